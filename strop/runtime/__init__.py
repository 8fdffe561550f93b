"""Where a run's processes are: ranks on one machine, or ranks and remote roles on a Ray cluster."""
