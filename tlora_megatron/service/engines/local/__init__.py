"""The engine that starts gangs as processes of this host; nothing has to be installed for it."""
