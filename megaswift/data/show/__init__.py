"""`megaswift data show`: samples, loss masks and their certificate."""
