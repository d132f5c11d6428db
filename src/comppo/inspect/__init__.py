"""See where credit goes: one HTML page with every response coloured by it, from tensors that a user already has.

Needs no trainer and no model: advantages of TRL, verl, OpenRLHF or anything else will do.
"""

from comppo.inspect.operators import OperatorCredit, operator_credit
from comppo.inspect.tensors import report
from comppo.report.inspect_page import write_page

__all__ = ["OperatorCredit", "operator_credit", "report", "write_page"]
