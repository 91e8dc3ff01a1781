"""From a job, its machines and options to a plan or a prediction: the one door for the API, commands and launcher."""
