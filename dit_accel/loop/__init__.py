"""Decide which steps are computed, and forecast the others.

The package answers three questions. When is a step computed? How is the output of a step forecast that is not? And how
much memory do the records take? It knows no models: a driver in ``dit_accel.models`` opens a call and runs the blocks.

Read ``closed_loop.py`` first: it decides, forecasts and corrects for one branch of guidance. ``forecast.py`` computes
the weights of a forecast, ``moves.py`` and ``growth.py`` the effect of an error on the result. Then read
``controller.py``, which says what a transformer's call does, and ``branches.py``, which finds the branch of a call.
``tracker.py`` reads the step from the scheduler. ``memory.py`` and ``storage.py`` fit the caches into a budget, and
``report.py`` has the record of a run. ``interval.py`` is the fixed interval of the papers.
"""
