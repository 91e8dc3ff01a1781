"""Many real launchers on one machine: a network of namespaces, stand-ins for workers, and jobs of forked launchers."""
