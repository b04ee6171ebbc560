"""From documents to the micro-batches of a rank: order, packing, collation, position."""
