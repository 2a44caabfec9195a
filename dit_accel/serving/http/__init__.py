"""HTTP server with OpenAI's interface for images and videos.

Read :mod:`~dit_accel.serving.http.server` first: it has the application and the routes of images. ``connections`` and
``bodies`` read what clients send, ``requests`` has its fields and rules, ``api`` has limits and errors, and ``access``
checks keys and hosts. ``videos`` has the routes and jobs of videos; ``log`` and ``metrics`` note requests.
"""
