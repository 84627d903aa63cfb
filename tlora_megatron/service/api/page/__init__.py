"""Who trains beside whom, where, how fast and why: views, figures and the page that draws them."""
