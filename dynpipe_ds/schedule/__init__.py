"""What a stage runs in a batch, and in which sequence: an order is a value, predicted and executed alike.

Pure: ``order`` (the value), ``makers`` (orders by name). :mod:`dynpipe_ds.simulation` says how long an order takes,
``host/order.py`` turns it into DeepSpeed's instructions.
"""

from dynpipe_ds.schedule.makers import ScheduleName, order_of, split_at_once
from dynpipe_ds.schedule.order import Instruction, Op, Order

__all__ = ["Instruction", "Op", "Order", "ScheduleName", "order_of", "split_at_once"]
