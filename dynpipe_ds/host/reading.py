"""What a rank trains on: which micro-batches, from where, and how far this rank has come in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dynpipe_ds.host.data_position import DataPosition, LateLoader
from dynpipe_ds.host.dealing import Hand, dealt
from dynpipe_ds.host.kept_data import KeptData
from dynpipe_ds.host.rereading import OpenAt, Position, deal, opened, position_of
from dynpipe_ds.host.slicing import Slicing

FOR_EVER = 2**62
"""A batch that never comes."""


class Reading:
    """One rank's data.

    Args:
        engine: DeepSpeed's.

    Attributes:
        behind: where this stage is in the data.
        kept: what it has read since a moment that training may go back to.
        slicing: the data in micro-batches of another size than the loader's.
        open_at: opens the data at a batch, if the user has said how.
        source: whose data the user's iterators give.
        num_sources: replicas for which data is made.
        before: called once, when the next training batch has its iterator and has read nothing.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.behind = DataPosition()
        self.kept = KeptData()
        self.slicing: Slicing
        self.open_at: OpenAt | None = None
        self.source, self.num_sources = 0, 1
        self.before: Callable[[], object] | None = None
        self._has_left_iterators = False

    def start(self) -> None:
        """Begin, after DeepSpeed's constructor."""
        self.slicing = Slicing(int(self._engine.micro_batch_size))
        self.source, self.num_sources = self._replica, self._num_replicas

    @property
    def _replica(self) -> int:
        return int(self._engine.grid.get_data_parallel_id())

    @property
    def _num_replicas(self) -> int:
        return int(self._engine.grid.get_data_parallel_world_size())

    @property
    def is_here(self) -> bool:
        """Whether this stage takes micro-batches from the user's iterators."""
        return bool(self._engine.is_first_stage() or self._engine.is_last_stage())

    # -- how much -----------------------------------------------------------------------------

    @property
    def num_loaded(self) -> int:
        """Micro-batches that a training batch takes here from the data, which go on to have the JSON's size."""
        return int(self._engine.micro_batches) * int(self._engine.micro_batch_size) // self.slicing.loader_size

    @property
    def num_of_source(self) -> int:
        """Micro-batches that a training batch takes from the data of each source.

        Raises:
            ValueError: if that is no whole number.
        """
        return self._shared_out(self.num_loaded)

    def _shared_out(self, number: int) -> int:
        """Of so many for each replica, how many are of each source."""
        everything = number * self._num_replicas
        if everything % self.num_sources:
            raise ValueError(
                f"a batch of {everything} micro-batches can't be dealt: data is made for the {self.num_sources} "
                f"replicas with which the job was started, of which {self._num_replicas} are left; take a "
                f"train_batch_size of which each of the {self.num_sources} has as many micro-batches"
            )
        return everything // self.num_sources

    @property
    def hands(self) -> tuple[Hand, ...]:
        """What this replica trains of every source."""
        return dealt(self._replica, self.num_loaded, self.num_of_source)

    def offsets(self, base: int) -> dict[int, int]:
        """As which micro-batch of its source each one counts that is trained here.

        Layers are seeded by it, so that dropout is what it was on a replica that is gone.

        Args:
            base: micro-batches that each source had before this batch.

        Returns:
            By the number that it would have here; empty where both are the same.
        """
        number = int(self._engine.micro_batches)
        if self._num_replicas == self.num_sources or number * self._num_replicas % self.num_sources:
            return {}
        each = self._shared_out(number)
        first = self._replica * number
        return {base + i: base + (first + i) % each for i in range(number)}

    # -- the user's iterators -----------------------------------------------------------------

    def keep_loader(self, loader: Any) -> None:
        """Remember a loader that this stage does not read; DeepSpeed has it already."""
        if not self.is_here:
            self._engine.data_iterator = LateLoader(loader)

    def keep_iterator(self, iterator: Any) -> None:
        """Remember an iterator that this stage does not read; bring one that it reads to where the others' are."""
        if self.is_here:
            self.behind.catch_up(iterator)
        else:
            self._engine.data_iterator = iterator

    def note_read(self, num_micro_batches: int) -> None:
        """Keep count of micro-batches that other stages have read from the present iterator."""
        if self.kept.is_evaluating:  # which may be tried again, with this rank as one that reads
            return
        if self.kept.is_first_time() and not self.is_here:
            self.behind.fall_behind(self._engine.data_iterator, num_micro_batches)

    def note_evaluated(self, iterator: Any, num_micro_batches: int) -> None:
        """Keep count of what an evaluation that is over has read elsewhere and not here.

        Args:
            iterator: of the evaluation.
            num_micro_batches: that it had.
        """
        if num_micro_batches > self.kept.num_evaluated:
            self.behind.fall_behind(iterator, num_micro_batches - self.kept.num_evaluated)

    @property
    def lacks_replicas(self) -> bool:
        """Whether some of the replicas for which data is made are gone, and the others train their micro-batches."""
        return self._num_replicas < self.num_sources

    def next(self, read: Callable[[], Any]) -> Any:
        """A micro-batch that this rank trains, or evaluates.

        Args:
            read: reads one from the user's iterator.

        Raises:
            ValueError: if it is of a replica that is gone, and can't be read.
        """
        batch = self.kept.present_batch
        if batch is not None and self.is_of_others and not self.kept.reads_again(batch):  # it reads from now on
            source = self.since(batch, FOR_EVER, None)
            if source is None:
                raise ValueError("this rank is to train micro-batches of lost replicas; say by engine.data_at how")
            self.kept.read_again(source, batch, batch, FOR_EVER)
        return self.kept.next(read)

    def begin(self) -> None:
        """Take note that a training batch is about to read."""
        if self.before is not None and not self.kept.is_evaluating:
            self.before()
            self.before = None

    def catch_up(self) -> None:
        """Bring the present iterator to where the other stages' are.

        Raises:
            ValueError: if there is none, or it ends before.
        """
        if self.is_of_others:
            return
        if self._engine.data_iterator is None:
            raise ValueError(
                f"stage {self._engine.stage_id} would become the last of the pipeline and read labels, but was given "
                "no data iterator; pass data_iter to train_batch on every rank, or keep the last stage"
            )
        self.behind.catch_up(self._engine.data_iterator)

    def missed(self, num_batches: int) -> None:
        """Take note of batches that others have trained, and this rank has not read.

        Args:
            num_batches: how many.
        """
        if num_batches and not self.is_of_others:
            self.behind.fall_behind(self._engine.data_iterator, num_batches * self.num_loaded)

    # -- reading again ------------------------------------------------------------------------

    @property
    def is_of_others(self) -> bool:
        """Whether this rank trains other data than the user's iterators give; from then on it does so for good."""
        own = (Hand(self.source, 0, self.num_loaded),)
        return self._has_left_iterators or self._num_replicas != self.num_sources or self.hands != own

    def position(self) -> Position | None:
        """Where the present iterator is; ``None`` if it can't go back there."""
        iterator = self._engine.data_iterator
        return position_of(iterator, self.behind.behind(iterator))

    def since(self, batch: int, until: int, position: Position | None) -> Iterator[Any] | None:
        """The micro-batches of earlier batches once more, as this replica trains them.

        Args:
            batch: the first one.
            until: behind the last one.
            position: of the iterator when that batch began.

        Returns:
            ``None`` if they can't be read again.
        """
        if self.open_at is not None:
            self._has_left_iterators |= self.is_of_others
            streams = {hand.source: opened(self.open_at, batch, hand.source) for hand in self.hands}
            return deal(streams, lambda: (self.hands, self.num_of_source))
        return None if position is None else position.read((until - batch) * self.num_loaded)
