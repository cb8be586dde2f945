"""How bytes move between the processes of a job."""
