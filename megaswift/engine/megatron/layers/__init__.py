"""The modules of a transformer layer: plain torch ones, and Transformer Engine's where they are used."""
