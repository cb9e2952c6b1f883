"""The table of torch's functions and methods, and how JAX spells them.

An entry is `signature => JAX code`, with torch's own Python signature, or several names of one signature: NAME in the
code is the name, without a prefix `linalg_` or `fft_`, or what stands after a colon, as in `acos:arccos`. A method is
listed as the function whose first argument is the tensor, and `x.add_(y)` uses the entry of `add`. Entries of one name
are tried in order, and the first whose parameters accept the call is used. Types of parameters: `Tensor`, of any dtype,
`floats` or `integers`; `number` (of Python), `int`, `ints` (one or several), `bool`, `str`, `list`, `dtype`, or a
literal; without a type, anything is accepted.

In the code, `{x}` is an argument, `{x:0}` one with a default, and `axis={dim?}` is left out if the call does not pass
`dim`. `{dtype_of_result}` is the dtype that torch returned, `{key}` a random key, and `{size_args}` the arguments of
`*size`, as in the call. Names without a module are functions of `ties.py` and `helpers.py`, which the written module
copies.

A third column, `=> code`, is the strict spelling, for programs in which the plain one has another derivative at a tie
or bound, or another value for NaN, and that matters.
"""

from __future__ import annotations

from jaxfn._torch.ties import CLAMP

ELEMENTWISE = """
abs absolute(input) => jnp.abs({input}) => absolute({input})
acos:arccos acosh:arccosh asin:arcsin asinh:arcsinh atan:arctan atanh:arctanh conj_physical:conj fix:trunc sgn:sign \
    arccos arccosh angle arcsin arcsinh arctan arctanh ceil conj cos cosh deg2rad exp exp2 expm1 floor isfinite isinf \
    isnan isneginf isposinf isreal log log10 log1p log2 logical_not rad2deg round signbit sin sinc sinh sqrt square \
    tan tanh trunc(input) => jnp.NAME({input})
adjoint(input) => {input}.conj().mT
add:+ sub:-(input, alpha: number, other: Tensor) => {input} NAME {alpha} * {other}
add:+ sub:-(input, other, *, alpha) => {input} NAME {alpha} * {other}
addcdiv:/ addcmul:*(input, tensor1: Tensor, tensor2: Tensor) => {input} + {tensor1} NAME {tensor2}
addcdiv:/ addcmul:*(input, value: number, tensor1: Tensor, tensor2: Tensor) => \
    {input} + {value} * ({tensor1} NAME {tensor2})
addcdiv:/ addcmul:*(input, tensor1, tensor2, *, value) => {input} + {value} * ({tensor1} NAME {tensor2})
arctan2 atan2:arctan2 copysign fmod gcd hypot lcm nextafter logaddexp logaddexp2 logical_and logical_or logical_xor \
    maximum minimum(input, other) => jnp.NAME({input}, {other})
add:+ bitwise_and:& bitwise_left_shift:<< bitwise_or:| bitwise_right_shift:>> bitwise_xor:^ div:/ divide:/ eq:== \
    ge:>= greater:> greater_equal:>= gt:> le:<= less:< less_equal:<= lt:< mul:* multiply:* ne:!= not_equal:!= \
    remainder:% sub:- subtract:- true_divide:/(input, other) => {input} NAME {other}
bitwise_not(input) => ~{input}
digamma erf erfc erfinv:erf_inv gammaln:lgamma lgamma psi:digamma rsqrt(input) => lax.NAME({input})
equal:array_equal(input, other) => jnp.NAME({input}, {other})
entr i0 i0e i1 i1e log_ndtr ndtr ndtri(input) => jax.scipy.special.NAME({input})
gammainc gammaincc igamma:gammainc igammac:gammaincc xlog1py zeta(input, other) => \
    jax.scipy.special.NAME({input}, {other})
div(input, other, *, rounding_mode: None) => {input} / {other}
div(input, other, *, rounding_mode: "floor") => {input} // {other} => floor_divide({input}, {other})
div(input: floats, other, *, rounding_mode: "trunc") => jnp.trunc({input} / {other})
div(input, other: floats, *, rounding_mode: "trunc") => jnp.trunc({input} / {other})
div(input, other, *, rounding_mode: "trunc") => jnp.sign({input}) * jnp.sign({other}) * (jnp.abs({input}) // \
    jnp.abs({other}))
float_power(input, exponent) => {input}.astype(float) ** {exponent}
floor_divide(input, other) => {input} // {other} => floor_divide({input}, {other})
fmax:>= fmin:<=(input, other) => jnp.where(({input} NAME {other}) | jnp.isnan({other}), {input}, {other})
frac(input) => {input} - jnp.trunc({input})
heaviside(input, values) => jnp.heaviside({input}, {values})
imag real(input) => {input}.NAME
isin(elements, test_elements) => jnp.isin({elements}, {test_elements})
isclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False) => \
    jnp.isclose({input}, {other}, rtol={rtol?}, atol={atol?}, equal_nan={equal_nan?})
ldexp(input, other) => {input} * 2.0 ** {other}
lerp(input, end, weight) => {input} + {weight} * ({end} - {input}) => \
    jnp.where(jnp.abs({weight}) < 0.5, {input} + {weight} * ({end} - {input}), {end} - ({end} - {input}) * (1 - \
    {weight}))
logit(input) => jnp.log({input} / (1 - {input}))
masked_fill(input, mask, value) => jnp.where({mask}, {value}, {input})
multigammaln mvlgamma:multigammaln(input, p) => jax.scipy.special.NAME({input}, {p})
nan_to_num(input, nan=0.0, posinf=None, neginf=None) => jnp.nan_to_num({input}, nan={nan?}, posinf={posinf?}, \
    neginf={neginf?})
neg negative(input) => -{input}
polygamma(n, input) => jax.scipy.special.polygamma({n}, {input})
polar(abs, angle) => lax.complex({abs} * jnp.cos({angle}), {abs} * jnp.sin({angle}))
positive(input) => {input}
pow(input, exponent) => {input} ** {exponent} => power({input}, {exponent})
reciprocal(input) => 1 / {input}
round(input, *, decimals: int) => jnp.round({input}, {decimals})
rsub(input, other) => {other} - {input}
expit sigmoid(input) => jax.nn.sigmoid({input})
sign(input) => jnp.sign({input}) => jnp.where(jnp.isnan({input}), 0, jnp.sign({input}))
where(condition, input, other) => jnp.where({condition}, {input}, {other})
where[method](input, condition, other) => jnp.where({condition}, {input}, {other})
xlogy(input, other) => {input} * jnp.log({other}) => jax.scipy.special.xlogy({input}, {other})
"""

CLAMPS = """
clamp clip(input, min: number, max: number) => jnp.clip({input}, {min}, {max}) => CLAMP({input}, {min}, {max})
clamp clip(input, min=None, max=None) => jnp.clip({input}, min={min?}, max={max?}) => \
    CLAMP({input}, low={min?}, high={max?})
clamp_min(input, min) => jnp.maximum({input}, {min}) => CLAMP({input}, low={min})
clamp_max(input, max) => jnp.minimum({input}, {max}) => CLAMP({input}, high={max})
""".replace("CLAMP", CLAMP.__name__)

ACTIVATIONS = """
celu(input, alpha=1.0) => jax.nn.celu({input}, {alpha?}) => elu({input}, {alpha:1.0}, 1 / {alpha:1.0})
elu(input, alpha=1.0) => jax.nn.elu({input}, {alpha?}) => elu({input}, {alpha?})
gelu(input, approximate: "tanh") => jax.nn.gelu({input})
gelu(input, approximate: "none") => jax.nn.gelu({input}, approximate=False)
gelu(input) => jax.nn.gelu({input}, approximate=False)
glu(input, dim=-1) => jax.nn.glu({input}, {dim?})
hardshrink(input, lambd=0.5) => jnp.where(({input} >= -{lambd:0.5}) & ({input} <= {lambd:0.5}), 0, {input})
hardsigmoid(input) => jax.nn.hard_sigmoid({input}) => jnp.where({input} <= -3, 0, jnp.where({input} >= 3, 1, {input} \
    / 6 + 0.5))
hardswish(input) => jax.nn.hard_swish({input}) => jnp.where({input} <= -3, 0, jnp.where({input} >= 3, {input}, \
    {input} * ({input} + 3) / 6))
hardtanh(input, min_val=-1.0, max_val=1.0) => jnp.clip({input}, {min_val:-1.0}, {max_val:1.0}) => \
    clamp_to_bounds({input}, {min_val:-1.0}, {max_val:1.0})
leaky_relu(input, negative_slope=0.01) => jax.nn.leaky_relu({input}, {negative_slope?}) => \
    jnp.where({input} > 0, {input}, {input} * {negative_slope:0.01})
log_softmax softmax(input, dim: int, *, dtype) => jax.nn.NAME({input}.astype({dtype}), axis={dim})
log_softmax softmax(input, dim: int, _stacklevel=3) => jax.nn.NAME({input}, axis={dim})
log_sigmoid mish silu(input) => jax.nn.NAME({input})
prelu(input, weight) => jnp.where({input} > 0, {input}, {weight} * {input})
relu(input) => jax.nn.relu({input}) => jnp.where({input} <= 0, 0, {input})
relu6(input) => jnp.clip({input}, 0, 6) => clamp_to_bounds({input}, 0, 6)
_log_softmax_backward_data(grad_output, output, dim, input_dtype) => {grad_output} - jnp.exp({output}) * \
    {grad_output}.sum(axis={dim}, keepdims=True)
_softmax_backward_data(grad_output, output, dim, input_dtype) => {grad_output} * {output} - {output} * \
    ({grad_output} * {output}).sum(axis={dim}, keepdims=True)
selu(input) => jax.nn.selu({input}) => 1.0507009873554805 * elu({input}, 1.6732632423543772)
softmin(input, dim: int) => jax.nn.softmax(-{input}, axis={dim})
softplus(input) => jax.nn.softplus({input}) => softplus({input})
softplus(input, beta=1.0, threshold=20.0) => softplus({input}, beta={beta?}, threshold={threshold?})
softshrink(input, lambd=0.5) => jnp.where({input} > {lambd:0.5}, {input} - {lambd:0.5}, jnp.where({input} < \
    -{lambd:0.5}, {input} + {lambd:0.5}, {input} * 0))
softsign(input) => jax.nn.soft_sign({input})
tanhshrink(input) => {input} - jnp.tanh({input})
threshold(input, threshold, value) => jnp.where({input} > {threshold}, {input}, {value}) => \
    jnp.where({input} <= {threshold}, {value}, {input})
dropout(input, p=0.5, training: False = True) => {input}
"""

REDUCTIONS = """
all(input, dim=None, keepdim=False) => {input}.all(axis={dim?}, keepdims={keepdim?}) => \
    jnp.all({input}, axis={dim?}, keepdims={keepdim?})
aminmax(input, *, dim=None, keepdim=False) => ({input}.min(axis={dim?}, keepdims={keepdim?}), \
    {input}.max(axis={dim?}, keepdims={keepdim?}))
allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False) => \
    jnp.allclose({input}, {other}, rtol={rtol?}, atol={atol?}, equal_nan={equal_nan?})
amax:max amin:min any argmax argmin(input, dim=None, keepdim=False) => {input}.NAME(axis={dim?}, keepdims={keepdim?})
argsort(input, dim=-1, descending=False) => jnp.argsort({input}, axis={dim?}, descending={descending?})
argsort(input, *, stable, dim=-1, descending=False) => jnp.argsort({input}, axis={dim?}, descending={descending?})
cov(input) => jnp.cov({input})
count_nonzero(input, dim=None) => jnp.count_nonzero({input}, axis={dim?})
cumprod(input, dim: int) => jnp.cumprod({input}, axis={dim})
cumsum(input, dim: int, *, dtype=None) => jnp.cumsum({input}, axis={dim}, dtype={dtype?})
dist(input, other, p=2) => vector_norm({input} - {other}, {p?})
cummax cummin(input, dim: int) => (lax.NAME({input}, axis={dim}), None)
kthvalue(input, k: int, dim: int = -1, keepdim=False) => with_index({input}, lax.index_in_dim(jnp.argsort({input}, \
    {dim:-1}), {k} - 1, {dim:-1}), {dim:-1}, {keepdim?})
msort(input) => jnp.sort({input}, axis=0)
nanmean nansum(input, dim=None, keepdim=False) => jnp.NAME({input}, axis={dim?}, keepdims={keepdim?})
nanquantile quantile(input, q, dim: ints = None, keepdim=False) => \
    jnp.NAME({input}, {q}, axis={dim?}, keepdims={keepdim?})
trapezoid trapz(y, x: Tensor, *, dim=-1) => jnp.trapezoid({y}, {x}, axis={dim?})
trapezoid trapz(y, *, dx=1, dim=-1) => jnp.trapezoid({y}, dx={dx?}, axis={dim?})
linalg_norm(A, ord: None = None, dim: None = None, keepdim=False) => jnp.linalg.norm({A}, keepdims={keepdim?}) => \
    vector_norm({A}, keepdims={keepdim?})
linalg_norm(A, ord=None, *, dim: int, keepdim=False) => jnp.linalg.norm({A}, {ord?}, axis={dim}, keepdims={keepdim?}) \
    => vector_norm({A}, {ord?}, axis={dim}, keepdims={keepdim?})
linalg_vector_norm(x, ord=2, dim=None, keepdim=False) => vector_norm({x}, {ord?}, axis={dim?}, keepdims={keepdim?})
logcumsumexp(input, dim: int) => lax.cumlogsumexp({input}, axis={dim})
logsumexp(input, dim, keepdim=False) => jax.nn.logsumexp({input}, axis={dim}, keepdims={keepdim?})
max min(input) => {input}.NAME()
max:maximum min:minimum(input, other: Tensor) => jnp.NAME({input}, {other})
max min(input, dim: int, keepdim=False) => ({input}.NAME(axis={dim}, keepdims={keepdim?}), \
    {input}.argNAME(axis={dim}, keepdims={keepdim?})) => with_index({input}, jnp.argNAME({input}, {dim}, \
    keepdims=True), {dim}, {keepdim?})
mean prod sum(input, dim=None, keepdim=False, *, dtype=None) => {input}.NAME(axis={dim?}, dtype={dtype?}, \
    keepdims={keepdim?})
median(input) => median({input}.reshape(-1), 0)[0]
median(input, dim: int, keepdim=False) => median({input}, {dim}, {keepdim?})
norm(input) => jnp.linalg.norm({input}) => vector_norm({input})
norm(input, p: number, dim: int, keepdim=False) => jnp.linalg.norm({input}, {p}, axis={dim}, keepdims={keepdim?}) => \
    vector_norm({input}, {p}, axis={dim}, keepdims={keepdim?})
norm(input, *, dim: int, keepdim=False) => jnp.linalg.norm({input}, axis={dim}, keepdims={keepdim?}) => \
    vector_norm({input}, axis={dim}, keepdims={keepdim?})
norm(input, p: number = 2, dim=None, keepdim=False) => vector_norm({input}, {p?}, axis={dim?}, keepdims={keepdim?})
norm(input, p: "fro", dim=None, keepdim=False) => vector_norm({input}, 2, axis={dim?}, keepdims={keepdim?})
normalize(input, p=2.0, dim=1, eps=1e-12) => {input} / jnp.maximum(vector_norm({input}, {p?}, axis={dim:1}, \
    keepdims=True), {eps:1e-12})
sort(input, dim: int = -1, *, descending: False = False) => (jnp.sort({input}, axis={dim?}), jnp.argsort({input}, \
    axis={dim?})) => with_index({input}, jnp.argsort({input}, axis={dim?}), {dim:-1}, True)
sort(input, dim: int = -1, descending=False, stable=False) => (jnp.sort({input}, axis={dim?}, \
    descending={descending:False}), jnp.argsort({input}, axis={dim?}, descending={descending:False})) => \
    with_index({input}, jnp.argsort({input}, axis={dim?}, descending={descending:False}), {dim:-1}, True)
std(input, unbiased: bool) => {input}.std(ddof=int({unbiased})) => root({input}.var(ddof=int({unbiased})))
std(input, dim: ints = None, *, unbiased: False, keepdim=False) => \
    {input}.std(axis={dim?}, keepdims={keepdim?}) => root({input}.var(axis={dim?}, keepdims={keepdim?}))
std(input, dim: ints = None, unbiased: bool = True, keepdim=False) => \
    {input}.std(axis={dim?}, ddof=int({unbiased:True}), keepdims={keepdim?}) => \
    root({input}.var(axis={dim?}, ddof=int({unbiased:True}), keepdims={keepdim?}))
std(input, dim=None, *, correction, keepdim=False) => {input}.std(axis={dim?}, ddof={correction}, \
    keepdims={keepdim?}) => root({input}.var(axis={dim?}, ddof={correction}, keepdims={keepdim?}))
topk(input, k: int) => lax.top_k({input}, {k})
topk(input, k: int, dim: int = -1, largest: bool = True, sorted=True) => \
    with_index({input}, lax.slice_in_dim(jnp.argsort({input}, {dim:-1}, descending={largest:True}), 0, {k}, \
    axis={dim:-1}), {dim:-1}, True)
std_mean(input, dim: ints, unbiased: bool = True, keepdim=False) => \
    ({input}.std(axis={dim}, ddof=int({unbiased:True}), keepdims={keepdim?}), {input}.mean(axis={dim}, \
    keepdims={keepdim?}))
var_mean(input, dim: ints, unbiased: bool = True, keepdim=False) => \
    ({input}.var(axis={dim}, ddof=int({unbiased:True}), keepdims={keepdim?}), {input}.mean(axis={dim}, \
    keepdims={keepdim?}))
var(input, unbiased: bool) => {input}.var(ddof=int({unbiased}))
var(input, dim: ints = None, *, unbiased: False, keepdim=False) => {input}.var(axis={dim?}, keepdims={keepdim?})
var(input, dim: ints = None, unbiased: bool = True, keepdim=False) => \
    {input}.var(axis={dim?}, ddof=int({unbiased:True}), keepdims={keepdim?})
var(input, dim=None, *, correction, keepdim=False) => {input}.var(axis={dim?}, ddof={correction}, keepdims={keepdim?})
"""

SHAPES = """
atleast_1d atleast_2d(input: Tensor) => jnp.NAME({input})
broadcast_to(input, size) => jnp.broadcast_to({input}, {size})
block_diag(*tensors) => jax.scipy.linalg.block_diag({tensors_args})
cartesian_prod(*tensors) => jnp.stack(jnp.meshgrid({tensors_args}, indexing="ij"), axis=-1).reshape(-1, len({tensors}))
broadcast_tensors(*tensors) => jnp.broadcast_arrays({tensors_args})
cat:concatenate concat:concatenate concatenate stack(tensors, dim=0) => jnp.NAME({tensors}, axis={dim?})
channel_shuffle(input, groups) => {input}.reshape({input}.shape[0], {groups}, -1, *{input}.shape[2:]).swapaxes(1, \
    2).reshape({input}.shape)
chunk(input, chunks, dim=0) => jnp.split({input}, {chunks}, axis={dim?}) => \
    split({input}, -(-{input}.shape[{dim:0}] // {chunks}), {dim?})
diag tril triu(input, diagonal=0) => jnp.NAME({input}, {diagonal?})
diagflat(input, offset=0) => jnp.diagflat({input}, {offset?})
diag_embed(input) => jnp.where(jnp.eye({input}.shape[-1], dtype=bool), {input}[..., None], 0)
diff(input, n=1, dim=-1) => jnp.diff({input}, {n?}, axis={dim?})
diagonal(input, offset=0, dim1=0, dim2=1) => jnp.diagonal({input}, {offset?}, axis1={dim1?}, axis2={dim2?})
expand(input, *size) => jnp.broadcast_to({input}, {size})
expand(input, *size) => expand({input}, {size})
expand_as(input, other) => jnp.broadcast_to({input}, {other}.shape)
flatten ravel(input) => {input}.reshape(-1)
flatten(input, start_dim: int = 0, end_dim: -1 = -1) => {input}.reshape(*{input}.shape[:{start_dim}], -1)
flatten(input, start_dim: int = 0, end_dim: int = -1) => flatten({input}, {start_dim:0}, {end_dim:-1})
flip tile(input, *dims) => jnp.NAME({input}, {dims})
flip tile(input, dims) => jnp.NAME({input}, {dims})
fliplr flipud squeeze(input) => jnp.NAME({input})
sum_to_size(input, *size) => sum_to_shape({input}, {size})
column_stack dstack hstack row_stack:vstack vstack(tensors) => jnp.NAME({tensors})
dsplit hsplit vsplit(input, indices) => jnp.NAME({input}, {indices})
kron(input, other) => jnp.kron({input}, {other})
meshgrid(*tensors, indexing: str = "ij") => jnp.meshgrid({tensors_args}, indexing={indexing:"ij"})
moveaxis movedim(input, source, destination) => jnp.moveaxis({input}, {source}, {destination})
narrow(input, dim: int, start, length) => lax.dynamic_slice_in_dim({input}, {start}, {length}, {dim})
pixel_shuffle(input, upscale_factor) => pixel_shuffle({input}, {upscale_factor})
pixel_unshuffle(input, downscale_factor) => pixel_unshuffle({input}, {downscale_factor})
permute(input, *dims) => {input}.transpose({dims_args})
repeat(input, *repeats) => jnp.tile({input}, {repeats})
repeat_interleave(input, repeats: int, dim=None) => jnp.repeat({input}, {repeats}, axis={dim?})
reshape(input, *shape) => {input}.reshape({shape_args})
reshape_as view_as(input, other) => {input}.reshape({other}.shape)
roll(input, shifts, dims=None) => jnp.roll({input}, {shifts}, {dims?})
rot90(input, k=1, dims=(0, 1)) => jnp.rot90({input}, {k?}, axes={dims?})
select_scatter(input, src, dim: int, index) => at_index({input}, {dim}, {index}).set({src})
select(input, dim: int, index) => lax.index_in_dim({input}, {index}, {dim}, keepdims=False)
split(tensor, split_size_or_sections: int, dim=0) => split({tensor}, {split_size_or_sections}, {dim?})
split split_with_sizes(tensor, split_size_or_sections: ints, dim=0) => \
    jnp.split({tensor}, np.cumsum({split_size_or_sections})[:-1], axis={dim?})
tensor_split(input, indices_or_sections, dim=0) => jnp.array_split({input}, {indices_or_sections}, axis={dim?})
squeeze(input, dim: ints) => squeeze({input}, {dim})
swapaxes swapdims transpose(input, dim0, dim1) => {input}.swapaxes({dim0}, {dim1})
t(input) => {input}.T
unbind(input, dim=0) => jnp.unstack({input}, axis={dim?})
unflatten(input, dim: int, sizes) => unflatten({input}, {dim}, {sizes})
unfold[method](input, dimension: int, size: int, step: int) => windows({input}, {dimension}, {size}, {step})
unsqueeze(input, dim: int) => jnp.expand_dims({input}, {dim})
view(input, *shape: ints) => {input}.reshape({shape_args})
view_as_complex(input) => lax.complex({input}[..., 0], {input}[..., 1])
view_as_real(input) => jnp.stack([{input}.real, {input}.imag], axis=-1)
"""

INDEXING = """
bincount(input, weights=None, *, minlength: int) => jnp.bincount({input}, {weights?}, length={minlength})
bucketize(input, boundaries, *, right: bool = False) => jnp.searchsorted({boundaries}, {input}, side="right" if \
    {right:False} else "left") => jnp.searchsorted({boundaries}, {input}, side="right" if {right:False} else "left", \
    method="compare_all")
embedding(input, weight) => {weight}[{input}]
fill_diagonal(input, fill_value) => jnp.fill_diagonal({input}, {fill_value}, inplace=False)
gather(input, dim, index) => jnp.take_along_axis({input}, {index}, axis={dim}) => \
    at_along({input}, {dim}, {index}).get()
index_add(input, dim: int, index, source) => at_index({input}, {dim}, {index}).add({source})
index_add(input, dim: int, index, source, *, alpha) => at_index({input}, {dim}, {index}).add({alpha} * {source})
index_copy(input, dim: int, index, source) => at_index({input}, {dim}, {index}).set({source})
index_fill(input, dim: int, index, value) => at_index({input}, {dim}, {index}).set({value})
index_put(input, indices, values, accumulate: True) => {input}.at[tuple({indices})].add({values})
index_put(input, indices, values, accumulate: False = False) => {input}.at[tuple({indices})].set({values})
index_select(input, dim: int, index) => jnp.take({input}, {index}, axis={dim})
masked_scatter(input, mask, source) => masked_scatter({input}, {mask}, {source})
one_hot(tensor, num_classes: int) => jax.nn.one_hot({tensor}, {num_classes}, dtype=int)
scatter(input, dim: int, index, src: Tensor) => at_along({input}, {dim}, {index}).set({src}) => \
    at_along({input}, {dim}, {index}).set({src}[tuple(map(slice, {index}.shape))])
scatter(input, dim: int, index, value: number) => at_along({input}, {dim}, {index}).set({value})
scatter_add(input, dim: int, index, src) => at_along({input}, {dim}, {index}).add({src}) => \
    at_along({input}, {dim}, {index}).add({src}[tuple(map(slice, {index}.shape))])
scatter_reduce(input, dim: int, index, src, reduce: "sum", *, include_self: True = True) => \
    at_along({input}, {dim}, {index}).add({src}[tuple(map(slice, {index}.shape))])
scatter_reduce(input, dim: int, index, src, reduce: "amax", *, include_self: True = True) => \
    at_along({input}, {dim}, {index}).max({src}[tuple(map(slice, {index}.shape))])
scatter_reduce(input, dim: int, index, src, reduce: "amin", *, include_self: True = True) => \
    at_along({input}, {dim}, {index}).min({src}[tuple(map(slice, {index}.shape))])
searchsorted(sorted_sequence, input, *, side: str) => jnp.searchsorted({sorted_sequence}, {input}, side={side}) => \
    jnp.searchsorted({sorted_sequence}, {input}, side={side}, method="compare_all")
searchsorted(sorted_sequence, input, *, right: bool = False) => jnp.searchsorted({sorted_sequence}, {input}, \
    side="right" if {right:False} else "left") => jnp.searchsorted({sorted_sequence}, {input}, side="right" if \
    {right:False} else "left", method="compare_all")
unravel_index(indices, shape) => jnp.unravel_index({indices}, {shape})
take(input, index) => {input}.reshape(-1)[{index}]
take_along_dim(input, indices, dim: int) => jnp.take_along_axis({input}, {indices}, axis={dim})
"""

LINEAR_ALGEBRA = """
addmm(input, mat1: Tensor, mat2: Tensor) => {input} + {mat1} @ {mat2}
addmm(input, mat1, mat2, *, beta=1, alpha=1) => {beta:1} * {input} + {alpha:1} * ({mat1} @ {mat2})
addbmm(input, batch1, batch2) => {input} + ({batch1} @ {batch2}).sum(axis=0)
addmv(input, mat, vec, *, beta=1, alpha=1) => {beta:1} * {input} + {alpha:1} * ({mat} @ {vec})
addr(input, vec1, vec2, *, beta=1, alpha=1) => {beta:1} * {input} + {alpha:1} * jnp.outer({vec1}, {vec2})
baddbmm(input, batch1: Tensor, batch2: Tensor) => {input} + {batch1} @ {batch2}
baddbmm(input, batch1, batch2, *, beta=1, alpha=1) => {beta:1} * {input} + {alpha:1} * ({batch1} @ {batch2})
bmm linalg_matmul matmul mm(input, other) => {input} @ {other}
cdist(x1, x2, p=2.0) => vector_norm({x1}[..., :, None, :] - {x2}[..., None, :, :], {p:2.0}, axis=-1)
cholesky_inverse(L) => jax.scipy.linalg.cho_solve(({L}, True), jnp.eye({L}.shape[-1], dtype={L}.dtype))
cholesky_solve(B, L) => jax.scipy.linalg.cho_solve(({L}, True), {B})
det inverse:inv linalg_cond linalg_det linalg_eig linalg_eigvals linalg_inv linalg_matrix_rank linalg_pinv linalg_qr \
    linalg_slogdet pinverse:pinv qr slogdet(A) => \
    jnp.linalg.NAME({A})
cross(input, other, dim: int) => jnp.cross({input}, {other}, axis={dim})
dot(input, tensor) => {input} @ {tensor}
einsum(equation, *operands) => jnp.einsum({equation}, {operands_args})
ger:outer inner vdot(input, other) => jnp.NAME({input}, {other})
cholesky linalg_cholesky(A) => jnp.linalg.cholesky({A}) => lax.linalg.cholesky(hermitian({A}), symmetrize_input=False)
linalg_eigh(A) => jnp.linalg.eigh({A}) => jnp.linalg.eigh(hermitian({A}), symmetrize_input=False)
linalg_eigvalsh(A) => jnp.linalg.eigvalsh({A}) => jnp.linalg.eigvalsh(hermitian({A}))
linalg_matrix_norm(A, ord="fro") => jnp.linalg.norm({A}, {ord:"fro"}, axis=(-2, -1))
linalg_matrix_power matrix_power(A, n) => jnp.linalg.matrix_power({A}, {n})
linalg_multi_dot(tensors) => jnp.linalg.multi_dot({tensors})
linalg_svdvals(A) => jnp.linalg.svd({A}, compute_uv=False)
linalg_vecdot(x, y, *, dim=-1) => ({x}.conj() * {y}).sum(axis={dim:-1})
linalg_cross(input, other, *, dim=-1) => jnp.cross({input}, {other}, axis={dim:-1})
linalg_matrix_exp(A) => jax.scipy.linalg.expm({A})
linalg_lu_factor(A) => jax.scipy.linalg.lu_factor({A})
linalg_lu_solve(LU, pivots, B) => jax.scipy.linalg.lu_solve(({LU}, {pivots}), {B})
lu_solve(b, LU_data, LU_pivots) => jax.scipy.linalg.lu_solve(({LU_data}, {LU_pivots}), {b})
linalg_solve(A, B) => jnp.linalg.solve({A}, {B})
linalg_solve_triangular(A, B, *, upper: bool) => jax.scipy.linalg.solve_triangular({A}, {B}, lower=not {upper})
svd(input, some: True = True, compute_uv: True = True) => svd({input})
linalg_svd(A, full_matrices=True) => jnp.linalg.svd({A}, full_matrices={full_matrices?})
linear(input, weight, bias: Tensor) => {input} @ {weight}.T + {bias}
linear(input, weight) => {input} @ {weight}.T
linear(input, weight, bias) => {input} @ {weight}.T if {bias} is None else {input} @ {weight}.T + {bias}
logdet(input) => jnp.linalg.slogdet({input})[1]
matrix_exp(input) => jax.scipy.linalg.expm({input})
mv(input, vec) => {input} @ {vec}
outer(input, vec2) => jnp.outer({input}, {vec2})
tensordot(a, b, dims=2) => jnp.tensordot({a}, {b}, axes={dims?})
trace(input) => jnp.trace({input})
fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft(input, n=None, dim=-1, norm=None) => \
    jnp.fft.NAME({input}, n={n?}, axis={dim?}, norm={norm?})
fft_fftn fft_ifftn fft_irfftn fft_rfftn(input, s=None, dim=None, norm=None) => \
    jnp.fft.NAME({input}, s={s?}, axes={dim?}, norm={norm?})
fft_fft2 fft_ifft2 fft_irfft2 fft_rfft2(input, s=None, *, norm=None) => jnp.fft.NAME({input}, s={s?}, norm={norm?})
fft_fftfreq fft_rfftfreq(n, d=1.0, *, dtype=None) => jnp.fft.NAME({n}, {d?}, dtype={dtype:result})
fft_fftshift fft_ifftshift(input, dim=None) => jnp.fft.NAME({input}, axes={dim?})
"""

LAYERS = """
adaptive_avg_pool1d(input, output_size: 1) => {input}.mean(axis=-1, keepdims=True)
adaptive_avg_pool3d(input, output_size: 1) => {input}.mean(axis=(-3, -2, -1), keepdims=True)
adaptive_avg_pool2d(input, output_size: 1) => {input}.mean(axis=(-2, -1), keepdims=True)
adaptive_avg_pool2d(input, output_size: (1, 1)) => {input}.mean(axis=(-2, -1), keepdims=True)
adaptive_max_pool2d(input, output_size: 1) => {input}.max(axis=(-2, -1), keepdims=True)
avg_pool1d:1 avg_pool2d:2 avg_pool3d:3(input, kernel_size, stride=None, padding=0) => \
    pool({input}, NAME, lax.add, {kernel_size}, {stride?}, padding={padding?})
batch_norm(input, running_mean, running_var, weight=None, bias=None, training: False = False, momentum=0.1, \
    eps=1e-05) => batch_norm({input}, {running_mean}, {running_var}, {weight?}, bias={bias?}, eps={eps?})
cosine_similarity(x1, x2, dim=1, eps=1e-08) => cosine_similarity({x1}, {x2}, {dim?}, eps={eps?})
conv1d conv2d conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) => \
    convolution({input}, {weight}, {bias?}, stride={stride?}, padding={padding?}, dilation={dilation?}, \
    groups={groups?})
conv1d_input conv2d_input(input_size, weight, grad_output, stride=1, padding=0, dilation=1, groups=1) => \
    convolution_input({input_size}, {weight}, {grad_output}, stride={stride?}, padding={padding?}, \
    dilation={dilation?}, groups={groups?})
conv1d_weight conv2d_weight(input, weight_size, grad_output, stride=1, padding=0, dilation=1, groups=1) => \
    convolution_weight({input}, {weight_size}, {grad_output}, stride={stride?}, padding={padding?}, \
    dilation={dilation?}, groups={groups?})
conv_transpose1d conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, \
    dilation=1) => transposed_convolution({input}, {weight}, {bias?}, stride={stride?}, padding={padding?}, \
    output_padding={output_padding?}, groups={groups?}, dilation={dilation?})
cross_entropy(input, target: integers, weight=None, *, ignore_index=-100, reduction: str = "mean") => \
    nll_loss(jax.nn.log_softmax({input}, axis=1), {target}, {weight?}, ignore_index={ignore_index?}, \
    reduction={reduction?})
cross_entropy(input, target: floats) => -({target} * jax.nn.log_softmax({input}, axis=1)).sum(axis=1).mean()
cross_entropy(input, target: floats, *, reduction: "none") => -({target} * jax.nn.log_softmax({input}, \
    axis=1)).sum(axis=1)
fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1) => \
    fold({input}, {output_size}, {kernel_size}, dilation={dilation?}, padding={padding?}, stride={stride?})
interpolate(input, size=None, scale_factor=None, mode: "nearest" = "nearest") => \
    resize({input}, {size:None}, {scale_factor?})
group_norm(input, num_groups, weight=None, bias=None, eps=1e-05) => \
    group_norm({input}, {num_groups}, {weight?}, bias={bias?}, eps={eps?})
interpolate(input, size=None, scale_factor=None, mode: "bilinear" = "nearest", align_corners: False = False) => \
    resize({input}, {size:None}, {scale_factor:None}, "linear")
kl_div(input, target, *, reduction: "batchmean", log_target: True) => \
    (jnp.exp({target}) * ({target} - {input})).sum() / {input}.shape[0]
kl_div(input, target, *, reduction: "batchmean") => ({target} * (jnp.log({target}) - {input})).sum() / \
    {input}.shape[0] => (jax.scipy.special.xlogy({target}, {target}) - {target} * {input}).sum() / {input}.shape[0]
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05) => \
    layer_norm({input}, {normalized_shape}, {weight?}, bias={bias?}, eps={eps?})
max_pool1d:1 max_pool2d:2 max_pool3d:3(input, kernel_size, stride=None, padding=0, dilation: 1 = 1, ceil_mode: False \
    = False) => pool({input}, NAME, lax.max, {kernel_size}, {stride?}, padding={padding?})
nll_loss(input, target, weight=None, *, ignore_index=-100, reduction: str = "mean") => \
    nll_loss({input}, {target}, {weight?}, ignore_index={ignore_index?}, reduction={reduction?})
constant_pad_nd(input, pad, value=0) => pad({input}, {pad}, {value?})
pad(input, pad, mode: "constant" = "constant", value=0) => pad({input}, {pad}, {value?})
pad(input, pad, mode: str) => pad({input}, {pad}, mode={mode})
pairwise_distance(x1, x2, p=2.0, eps=1e-06, keepdim=False) => vector_norm({x1} - {x2} + {eps:1e-6}, {p:2.0}, axis=-1, \
    keepdims={keepdim?})
rms_norm(input, normalized_shape, weight=None, eps=None) => rms_norm({input}, {normalized_shape}, {weight?}, \
    eps={eps?})
scaled_dot_product_attention(query, key, value) => jax.nn.softmax({query} @ {key}.mT / np.sqrt({query}.shape[-1]), \
    axis=-1) @ {value}
unfold(input, kernel_size, dilation=1, padding=0, stride=1) => unfold({input}, {kernel_size}, dilation={dilation?}, \
    padding={padding?}, stride={stride?})
"""

# Losses of elements, which are averaged, added, or neither.
LOSSES = """
binary_cross_entropy(input, target) => -({target} * jnp.maximum(jnp.log({input}), -100) + (1 - {target}) * \
    jnp.maximum(jnp.log1p(-{input}), -100))
binary_cross_entropy_with_logits(input, target) => jax.nn.softplus({input}) - {input} * {target} => \
    (1 - {target}) * {input} - jax.nn.log_sigmoid({input})
cosine_embedding_loss(input1, input2, target, margin=0) => jnp.where({target} == 1, \
    1 - cosine_similarity({input1}, {input2}), jnp.where({target} == -1, jax.nn.relu(cosine_similarity({input1}, \
    {input2}) - {margin:0}), 0))
huber_loss(input, target, *, delta=1.0) => huber({input} - {target}, {delta?})
kl_div(input, target) => {target} * (jnp.log({target}) - {input}) => \
    jax.scipy.special.xlogy({target}, {target}) - {target} * {input}
kl_div(input, target, *, log_target: True) => jnp.exp({target}) * ({target} - {input})
l1_loss(input, target) => jnp.abs({input} - {target}) => absolute({input} - {target})
margin_ranking_loss(input1, input2, target, margin=0) => jax.nn.relu({margin:0} - {target} * ({input1} - {input2}))
mse_loss(input, target) => jnp.square({input} - {target})
poisson_nll_loss(input, target) => jnp.exp({input}) - {target} * {input}
smooth_l1_loss(input, target, *, beta=1.0) => huber({input} - {target}, {beta?}) / {beta:1.0}
soft_margin_loss(input, target) => jnp.log1p(jnp.exp(-{target} * {input})) => jax.nn.softplus(-{target} * {input})
triplet_margin_loss(anchor, positive, negative, margin=1.0) => jax.nn.relu(vector_norm({anchor} - {positive} + 1e-6, \
    axis=-1) - vector_norm({anchor} - {negative} + 1e-6, axis=-1) + {margin:1.0})
"""


def _with_reductions(losses: str) -> str:
    """Returns the entries of losses for each reduction; the one without `reduction` is the mean."""
    reductions = {"": ".mean()", 'reduction: "mean"': ".mean()", 'reduction: "sum"': ".sum()", 'reduction: "none"': ""}
    new: list[str] = []
    for parameter, code in reductions.items():
        for line in filter(None, losses.splitlines()):
            head, *spellings = line.split(" => ")
            added = f", {'' if '*' in head else '*, '}{parameter})" if parameter else ")"
            new.append(" => ".join([head[:-1] + added, *(f"({x}){code}" if code else x for x in spellings)]))
    return "\n".join((*new, ""))


# The dtype of results is written out, since JAX's default dtypes depend on x64.
CREATION = """
BoolTensor FloatTensor DoubleTensor HalfTensor IntTensor LongTensor Tensor(data: list) => \
    jnp.array({data}, {dtype_of_result})
BoolTensor FloatTensor DoubleTensor HalfTensor IntTensor LongTensor Tensor(*size: ints) => \
    jnp.zeros({size}, {dtype_of_result})
arange(end: int) => jnp.arange({end})
arange(start: int, end: int, step: int = 1) => jnp.arange({start}, {end}, {step?})
arange(end, *, dtype=None) => jnp.arange({end}, dtype={dtype:result})
arange(start, end, step=1, *, dtype=None) => jnp.arange({start}, {end}, {step?}, dtype={dtype:result})
as_tensor(data: Tensor, dtype=None) => jnp.asarray({data}, {dtype?})
tensor(data: Tensor, *, dtype=None) => jnp.array({data}, {dtype?}) => lax.stop_gradient(jnp.array({data}, {dtype?}))
as_tensor tensor(data: int) => jnp.array({data})
as_tensor tensor(data, dtype=None) => jnp.array({data}, {dtype:result})
complex(real, imag) => lax.complex({real}, {imag})
empty:zeros ones zeros(*size, dtype=None) => jnp.NAME({size}, {dtype:result})
empty_like:zeros_like ones_like zeros_like(input, *, dtype=None) => jnp.NAME({input}, dtype={dtype?})
eye(n, m=None, *, dtype=None) => jnp.eye({n}, {m?}, dtype={dtype:result})
from_numpy(ndarray) => jnp.asarray({ndarray})
full(size, fill_value: int) => jnp.full({size}, {fill_value})
full(size, fill_value, *, dtype=None) => jnp.full({size}, {fill_value}, {dtype:result})
full_like(input, fill_value, *, dtype=None) => jnp.full_like({input}, {fill_value}, dtype={dtype?})
linspace(start, end, steps, *, dtype=None) => jnp.linspace({start}, {end}, {steps}, dtype={dtype:result})
new[method](input) => jnp.zeros(0, {input}.dtype)
new[method](input, data: Tensor) => {data}
new[method](input, data: list) => jnp.array({data}, {input}.dtype)
new[method](input, *size: ints) => jnp.zeros({size}, {input}.dtype)
new_empty:zeros new_ones:ones new_zeros:zeros(input, *size, dtype) => jnp.NAME({size}, {dtype})
new_empty:zeros new_ones:ones new_zeros:zeros(input, *size) => jnp.NAME({size}, {input}.dtype)
new_full(input, size, fill_value, *, dtype) => jnp.full({size}, {fill_value}, {dtype})
new_full(input, size, fill_value) => jnp.full({size}, {fill_value}, {input}.dtype)
new_tensor(input, data, *, dtype) => jnp.array({data}, {dtype})
new_tensor(input, data) => jnp.array({data}, {input}.dtype)
tril_indices triu_indices(row, col, offset=0) => jnp.stack(jnp.NAME({row}, {offset?}, m={col}))
fill(input, value) => jnp.full_like({input}, {value})
zero(input) => jnp.zeros_like({input})
copy(input, src: Tensor) => {src}
copy(input, src: Tensor) => jnp.broadcast_to({src}, {input}.shape).astype({input}.dtype)
"""

CONVERSIONS = """
bfloat16 byte:uint8 cfloat:complex64 char:int8 float:float32 half:float16 int:int32 short:int16(input) => \
    {input}.astype(jnp.NAME)
bool double:float long:int(input) => {input}.astype(NAME)
clone(input) => {input} => jnp.array({input}, copy=True)
Parameter Variable(data, requires_grad=True) => {data} => lax.stop_gradient({data})
contiguous cpu resolve_conj resolve_neg to(input) => {input}
cuda(input, device=None) => {input}
detach(input) => {input} => lax.stop_gradient({input})
requires_grad_(input, requires_grad=True) => {input}
squeeze_copy(input) => jnp.squeeze({input})
to(input, dtype: dtype, copy=False) => {input}.astype({dtype})
to(input, other: Tensor) => {input}.astype({other}.dtype)
type(input) => {input}.dtype
type(input, dtype: dtype) => {input}.astype({dtype})
type_as(input, other) => {input}.astype({other}.dtype)
"""

QUESTIONS = """
dim:ndim ndimension:ndim nelement:size numel:size(input) => {input}.NAME
element_size(input) => {input}.dtype.itemsize
is_complex(input) => jnp.iscomplexobj({input})
is_contiguous(input) => True
is_floating_point(input) => jnp.issubdtype({input}.dtype, jnp.floating)
is_same_size(input, other) => {input}.shape == {other}.shape
is_tensor(obj) => isinstance({obj}, jax.Array)
resize_as(input, the_template) => jnp.zeros({the_template}.shape, {input}.dtype)
result_type(tensor1, tensor2) => jnp.result_type({tensor1}, {tensor2})
promote_types(type1, type2) => jnp.promote_types({type1}, {type2})
size(input) => {input}.shape
size(input, dim: int) => {input}.shape[{dim}]
Size(sizes) => tuple({sizes})
broadcast_shapes(*shapes) => jnp.broadcast_shapes({shapes_args})
finfo iinfo(type) => jnp.NAME({type})
is_available is_autocast_enabled(device_type="cuda") => False
is_scripting is_tracing is_in_onnx_export _are_functorch_transforms_active() => False
is_batchedtensor is_legacy_batchedtensor(input) => False
mark_dynamic(t, index) => None
grad(func, argnums=0, has_aux=False) => jax.grad({func}, {argnums?}, has_aux={has_aux?})
vmap(func, in_dims=0, out_dims=0) => jax.vmap({func}, {in_dims?}, {out_dims?})
grad_and_value(func, argnums=0, has_aux=False) => grad_and_value({func}, {argnums:0}, {has_aux:False})
"""

RANDOM = """
bernoulli sample(input) => jax.random.bernoulli({key}, {input}).astype({input}.dtype)
bernoulli(input, p) => jax.random.bernoulli({key}, {p}, {input}.shape).astype({input}.dtype)
gumbel_softmax(logits, tau: number = 1, hard: False = False, *, dim=-1) => \
    jax.nn.softmax(({logits} - jnp.log(jax.random.exponential({key}, {logits}.shape, {logits}.dtype))) / {tau:1}, \
    axis={dim:-1})
dropout(input, p: number, training: True = True) => dropout({key}, {input}, {p})[0]
exponential(input, lambd=1) => jax.random.exponential({key}, {input}.shape, {input}.dtype) / {lambd:1}
normal(input: Tensor, mean: number = 0, std: number = 1) => {mean:0} + {std:1} * jax.random.normal({key}, \
    {input}.shape, {input}.dtype)
rand:uniform randn:normal(*size, dtype=None) => jax.random.NAME({key}, {size}, {dtype:result})
rand_like:uniform randn_like:normal(input) => jax.random.NAME({key}, {input}.shape, {input}.dtype)
rand_like:uniform randn_like:normal(input, *, dtype) => jax.random.NAME({key}, {input}.shape, {dtype})
randint(high, size) => jax.random.randint({key}, {size}, 0, {high})
randint(low, high, size) => jax.random.randint({key}, {size}, {low}, {high})
randint_like(input, low, high) => jax.random.randint({key}, {input}.shape, {low}, {high}).astype({input}.dtype)
randperm(n) => jax.random.permutation({key}, {n})
uniform(input, a: number = 0, b: number = 1) => jax.random.uniform({key}, {input}.shape, {input}.dtype, {a?}, {b?})
"""

# Attributes of tensors that JAX spells in another way.
ATTRIBUTES = {
    "data": "{input} => lax.stop_gradient({input})",
    "H": "{input}.conj().T",
    "device": "None",
    "grad_fn": "None",
    "is_cuda": "False",
    "is_sparse": "False",
    "is_leaf": "False",
    "mH": "{input}.conj().mT",
}
# Attributes that arrays have too.
SHARED_ATTRIBUTES = frozenset({"T", "mT", "shape", "ndim", "dtype", "real", "imag", "itemsize", "nbytes"})
# Keyword arguments that only concern a tensor's device, storage and autograd.
IGNORED = frozenset(
    {
        "device",
        "requires_grad",
        "layout",
        "pin_memory",
        "memory_format",
        "non_blocking",
        "generator",
        "inplace",
        "async",
    }
)
# Functions for which nothing is to be written. (An input that is marked dirty gets a new value in JAX.)
DROPPED_STATEMENTS = frozenset(
    {"requires_grad_", "_assert_async", "synchronize", "empty_cache", "retain_grad", "mark_dirty", "mark_dynamic"}
)

_FUNCTIONS = ELEMENTWISE, CLAMPS, ACTIVATIONS, REDUCTIONS, SHAPES, INDEXING, LINEAR_ALGEBRA, LAYERS
TABLE = "".join((*_FUNCTIONS, _with_reductions(LOSSES), CREATION, CONVERSIONS, QUESTIONS, RANDOM))
