"""`megaswift board`: a web page for the runs of this machine."""
