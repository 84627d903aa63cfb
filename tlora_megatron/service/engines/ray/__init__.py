"""Gangs on a Ray cluster. Ray itself runs in a process of its own, the bridge.

Ray ends a program that has lost its cluster for a minute, and some of its calls wait for as long:
neither must happen to the service.
"""
