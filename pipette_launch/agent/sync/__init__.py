"""How the agents of a job meet, agree and part, through the store of the first of them."""
