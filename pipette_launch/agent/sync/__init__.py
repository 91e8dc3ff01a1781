"""How the agents of a job meet, agree and part, through the rendezvous store."""
