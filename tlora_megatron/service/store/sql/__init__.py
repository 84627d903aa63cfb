"""The database below a store: its tables, their versions, how it is opened and written."""
