"""`megaswift simulate`: what single ranks record, beside the same steps of real ranks over gloo."""
