"""Rules of the section `parallel` that concern several fields."""
