"""HTTP server with OpenAI's interface for images and videos.

``server`` has the application and the routes of images, and ``videos`` has the others. ``connections`` and ``bodies``
read what clients send, by the rules of ``requests``; ``access`` checks keys, and ``log`` and ``metrics`` note the ends.
"""
