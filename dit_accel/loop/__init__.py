"""When is a step computed, and what stands in for one that is not?"""
