"""What every core ATen operation is in JAX, by family."""

from jaxfn._torch._operations import activations as activations
from jaxfn._torch._operations import attention as attention
from jaxfn._torch._operations import comparison as comparison
from jaxfn._torch._operations import complex_numbers as complex_numbers
from jaxfn._torch._operations import convolution as convolution
from jaxfn._torch._operations import creation as creation
from jaxfn._torch._operations import elementwise as elementwise
from jaxfn._torch._operations import indexing as indexing
from jaxfn._torch._operations import linear_algebra as linear_algebra
from jaxfn._torch._operations import normalization as normalization
from jaxfn._torch._operations import pooling as pooling
from jaxfn._torch._operations import quantization as quantization
from jaxfn._torch._operations import random as random
from jaxfn._torch._operations import reductions as reductions
from jaxfn._torch._operations import resampling as resampling
from jaxfn._torch._operations import shapes as shapes
from jaxfn._torch._operations import sorting as sorting
from jaxfn._torch._operations import special as special
from jaxfn._torch._operations._table import REFUSED as REFUSED
from jaxfn._torch._operations._table import TABLE as TABLE
from jaxfn._torch._operations._table import Operation as Operation
from jaxfn._torch._operations._table import entry_name as entry_name
from jaxfn._torch._operations._table import refusal as refusal
