"""Makes a plan or a prediction from a job, its machines and options, for the API, the commands and the launcher."""
