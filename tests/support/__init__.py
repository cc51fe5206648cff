"""What the tests share: small models, small policies, one layer on random numbers, the judge, commands, a SLURM."""
