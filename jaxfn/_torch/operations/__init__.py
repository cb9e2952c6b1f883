"""Translations of ATen operations to JAX, by family."""

from jaxfn._torch.operations import activations as activations
from jaxfn._torch.operations import attention as attention
from jaxfn._torch.operations import comparison as comparison
from jaxfn._torch.operations import complex_numbers as complex_numbers
from jaxfn._torch.operations import convolution as convolution
from jaxfn._torch.operations import creation as creation
from jaxfn._torch.operations import elementwise as elementwise
from jaxfn._torch.operations import indexing as indexing
from jaxfn._torch.operations import linear_algebra as linear_algebra
from jaxfn._torch.operations import normalization as normalization
from jaxfn._torch.operations import pooling as pooling
from jaxfn._torch.operations import quantization as quantization
from jaxfn._torch.operations import random as random
from jaxfn._torch.operations import reductions as reductions
from jaxfn._torch.operations import resampling as resampling
from jaxfn._torch.operations import shapes as shapes
from jaxfn._torch.operations import sorting as sorting
from jaxfn._torch.operations import special as special
from jaxfn._torch.operations.promotion import half_to_single as half_to_single
from jaxfn._torch.operations.promotion import is_half as is_half
from jaxfn._torch.operations.table import TABLE as TABLE
from jaxfn._torch.operations.table import UNSUPPORTED as UNSUPPORTED
from jaxfn._torch.operations.table import Operation as Operation
from jaxfn._torch.operations.table import entry_name as entry_name
from jaxfn._torch.operations.table import unsupported_reason as unsupported_reason
