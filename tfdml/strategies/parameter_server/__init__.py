"""Parameter servers: variables are on servers, steps on workers, and the script on the chief."""
