"""Who calls, what that tenant may do, and how much of it."""
