"""Jobs on clusters: what `megaswift submit` renders and hands to the cluster's own scheduler. torch is not imported
here."""
