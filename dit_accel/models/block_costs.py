"""FLOPs of the blocks in a call: linear layers, and attention at its measured density."""

from collections.abc import Mapping

from torch import nn

from dit_accel.loop.branch import Call
from dit_accel.loop.tracker import StepMode
from dit_accel.models.families.family import Arguments, Attention, BlockWork, Family, Tokens
from dit_accel.sparse.site_state import SiteState, states_of


class BlockCosts:
    """FLOPs of a transformer's blocks, counted once for each kind of block (its class and its parts)."""

    def __init__(self, family: Family, blocks: dict[str, nn.Module], sites: dict[str, list[Attention]]) -> None:
        self._family = family
        self._sites = sites
        self._kinds = {name: (type(block), *dict(block.named_modules())) for name, block in blocks.items()}
        self._examples = {self._kinds[name]: block for name, block in blocks.items()}

    def of(self, transformer: nn.Module, arguments: Arguments, tokens: Tokens) -> dict[str, BlockWork]:
        examples = self._examples.items()
        works = {kind: self._family.block_work(transformer, arguments, tokens, example) for kind, example in examples}
        return {name: works[kind] for name, kind in self._kinds.items()}

    def account(self, call: Call, works: Mapping[str, BlockWork], level: str) -> None:
        """Fill ``call.work`` and ``call.branch.plain``."""
        kinds = {id(work): work for work in works.values()}
        totals = {key: (work.plain, sum(work.tiles.values())) for key, work in kinds.items()}
        may_skip = call.mode is StepMode.DISPATCH or len(call.branch.sites) > 0
        for name, work in works.items():
            call.branch.plain[name] = plain, pairs = totals[id(work)]
            others = plain - pairs
            if may_skip:
                pairs, others = self.computed(call, name, work, level)
            call.work[name] = pairs + others, pairs

    def computed(self, call: Call, name: str, work: BlockWork, level: str) -> tuple[float, float]:
        """FLOPs that a block computed in a call: attention scores and values, and all else."""
        pairs = sum(work.tiles.values())
        others = work.plain - pairs
        if call.mode is StepMode.DISPATCH:
            if name in call.blocks.dense:
                return pairs, others
            if level != "head" or (site := call.site(name, SiteState)).heads.degraded:
                return 0.0, 0.0
            densities = site.tiles.densities
            rows = work.rows * densities.rows + work.row_blocks * densities.row_blocks
            return pairs * densities.tiles, rows + work.rest
        for item in self._sites[name]:
            states = [*states_of(call.branch.sites, item.site)]
            for site in states:
                tiles, densities = site.tiles, site.tiles.densities
                if tiles.measured_step == call.tick.step:
                    older = len(site.heads.bias_coordinates[1:])
                    pairs -= work.tiles[item.name] * (1 - densities.attended - tiles.probed) / len(states)
                    others += work.bias * densities.projected * older
        return pairs, others
