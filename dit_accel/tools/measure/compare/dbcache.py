"""cache-dit, if installed: DBCache alone and with its calibrators, and its step masks (SCM)."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from dit_accel.tools.measure.compare.methods import Peer, Subject

# Warm-up and threshold.
_SETTINGS = [(3, 0.06), (3, 0.12), (3, 0.2), (3, 0.3), (3, 0.45), (3, 0.7), (8, 0.12), (8, 0.3)]
MASKS = ("slow", "medium", "fast", "ultra")
CALIBRATORS = {"TaylorSeer": "D=1", "DMD": "DMD", "FoCa": "FoCa"}  # their labels; they run with their defaults


def _why_not(pipe: Any, calibrator: str = "TaylorSeer") -> str | None:
    if find_spec("cache_dit") is None:
        return "cache-dit is not installed"
    import cache_dit

    _quieten()
    if not hasattr(cache_dit, f"{calibrator}CalibratorConfig"):
        return f"cache-dit {cache_dit.__version__} has no calibrator {calibrator}"
    known = cache_dit.BlockAdapterRegister.is_supported(pipe)
    return None if known else f"cache-dit {cache_dit.__version__} does not know {type(pipe).__name__}"


@contextmanager
def put_on(
    subject: Subject,
    warmup: int,
    threshold: float = 0.08,
    calibrator: str | None = None,
    mask: str | None = None,
    interval: int | None = None,
    policy: str = "dynamic",
) -> Iterator[dict[str, Any]]:
    """Within the block, run DBCache, with a mask of skippable steps if a ready-made one or one step in N is named."""
    import cache_dit

    _quieten()
    steps, masked = subject.steps, None
    if mask is not None:
        masked = cache_dit.steps_mask(total_steps=steps, mask_policy=mask)
    elif interval is not None:
        masked = [int(step < warmup or step % interval == 0 or step == steps - 1) for step in range(steps)]
    cache_dit.enable_cache(
        subject.pipe,
        cache_config=cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,  # the default 8 (of 57 in a full-size model) exceeds a demo model's blocks
            Bn_compute_blocks=0,
            max_warmup_steps=warmup,
            residual_diff_threshold=threshold,
            enable_separate_cfg=subject.branches == 2,
            num_inference_steps=steps,
            steps_computation_mask=masked,
            steps_computation_policy=policy,
        ),
        calibrator_config=calibrator and getattr(cache_dit, f"{calibrator}CalibratorConfig")(),
    )
    try:
        yield {}
    finally:
        cache_dit.disable_cache(subject.pipe)


def _quieten() -> None:
    """Silence cache-dit, which logs every setting, and a warning for every removal."""
    for name in logging.root.manager.loggerDict:
        if name.lower().startswith(("cache_dit", "cache-dit")):
            logging.getLogger(name).setLevel(logging.ERROR)


def _scm(subject: Subject, label: str, setting: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
    return put_on(subject, **setting, calibrator="TaylorSeer")


# Masks of skippable steps: the ready-made masks and, since those compute more than 0.35, one step in N.
# Under policy `dynamic` some masked steps are computed anyway.
_MASKED = [
    *((f"{mask} W=8 static", {"warmup": 8, "mask": mask, "policy": "static"}) for mask in MASKS),
    *((f"{mask} W=8 R=0.2 dynamic", {"warmup": 8, "mask": mask, "threshold": 0.2}) for mask in MASKS),
    *((f"W=3 N={count} static", {"warmup": 3, "interval": count, "policy": "static"}) for count in (3, 4, 6, 10)),
]
DBCACHES = {
    "dbcache": Peer("DBCache (cache-dit)", "DBCache W={} R={}", _SETTINGS, put_on, _why_not),
    **{
        f"dbcache-{calibrator.lower()}": Peer(
            f"DBCache + {calibrator} (cache-dit)",
            f"DBCache W={{}} R={{}} {label}",
            _SETTINGS,
            partial(put_on, calibrator=calibrator),
            partial(_why_not, calibrator=calibrator),
        )
        for calibrator, label in CALIBRATORS.items()
    },
    "scm": Peer("SCM + TaylorSeer (cache-dit)", "SCM {} D=1", _MASKED, _scm, _why_not),
}
