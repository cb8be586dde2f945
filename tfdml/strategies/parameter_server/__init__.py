"""Parameter servers: variables on servers, steps on workers, the script on the chief."""
