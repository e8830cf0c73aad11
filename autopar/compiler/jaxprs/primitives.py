"""The families of JAX's primitives, from which every set of rules is made.

A set of rules joins families and adds or takes away single primitives where it means to differ, with the reason beside
it. Names of several releases stand side by side: what a release does not have is never met.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """A set from words that are set apart by blanks."""
    return frozenset(text.split())


MANUAL = names("shard_map")
"""Primitives that run their body on parts of arrays, over axes of a mesh of their own; `pmap` is one too."""

# Elements as they are

CONSTRAINTS = names("sharding_constraint layout_constraint reshard")
"""Primitives that say where a value is to lie."""
LABELS = CONSTRAINTS | names("name stop_gradient pvary pcast")
"""Primitives whose result is their operand: what they say is for a compiler or a differentiation."""
COPIES = names("copy copy_p")
RESHAPES = names("reshape squeeze expand_dims")
"""Primitives whose results have the same elements in the same order."""
REORDERINGS = names("transpose rev")
SLICINGS = names("slice dynamic_slice split unstack")
CUTS = names("gather dynamic_slice slice")
"""Primitives that read no more of an array than they make."""
SPREADINGS = names("broadcast_in_dim tile")
JOINS = names("concatenate stack")
REARRANGEMENTS = LABELS | COPIES | RESHAPES | REORDERINGS | SLICINGS | SPREADINGS
"""Primitives whose results have elements of their first operand, and none else."""

# Element by element

ADDITIONS = names("add add_any")
WIDENING = "widen_gradient"
"""A conversion of summands to more bits, before which nothing may sum them."""
COMPRESSED_SUM = "compress_gradient_in_blocks"
"""The sum over devices of the summands that it is given, sent in 8 bits; of a sum that is made, its rounding."""
ELEMENTWISE = ADDITIONS | names(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz
    compress_gradient_in_blocks
    complex compress_gradient conj convert_element_type copysign cos cosh digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh widen_gradient xor zeros_like zeta
    """
)
"""Primitives that compute element i of a result from the elements i of the operands; scalars go with every element."""

# Along dimensions

REDUCTIONS = names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor")
ARGUMENT_REDUCTIONS = names("argmax argmin")
CUMULATIVE = names("cumsum cumprod cummax cummin cumlogsumexp")
SORTS = names("sort top_k approx_top_k")
WINDOWS = names("reduce_window reduce_window_sum reduce_window_max reduce_window_min")
SELECTIONS = names("select_and_scatter select_and_scatter_add select_and_gather_add")
"""Primitives in which a window picks an element: the derivatives of a maximum over windows."""
SCATTERS = names("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
MATRIX_PRODUCTS = names("dot_general ragged_dot ragged_dot_general")
PRODUCTS = MATRIX_PRODUCTS | {"conv_general_dilated"}
MASKED = PRODUCTS | names("reduce_sum reduce_max reduce_min scatter-add gather")
"""Primitives that sum, or take the greatest, over padding that can be replaced by what changes nothing."""
ATTENTION = names(
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper"
)
"""Attention in one kernel of cuDNN, and its gradients: `jax.nn.dot_product_attention(..., implementation="cudnn")`."""
FACTORIZATIONS = names(
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd "
    "symmetric_product triangular_solve tridiagonal"
)
"""Primitives that treat each matrix of a batch alike, and are not cheap."""

# Random numbers

DRAWS = names("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32")
"""Random bits, at tens of operations for each."""
KEYS = names("random_clone random_fold_in random_seed random_split random_unwrap random_wrap")
"""The primitives that make a key of another."""

# What the user sees, and what stands around other equations

VISIBLE = names("debug_callback debug_print io_callback")
"""Callbacks that are to happen once, whatever computes their operands."""
CALLBACKS = VISIBLE | {"pure_callback"}
FOREIGN = names("custom_call ffi_call pallas_call")
"""Primitives that run kernels of others."""
LOOPS = names("scan while")
CONTROL_FLOW = LOOPS | {"cond"}
REMAT = names("remat2 checkpoint remat")
"""The rematerialised region, by release of JAX."""
NESTED = CONTROL_FLOW | REMAT
"""Equations whose bodies are planned, not the equation itself."""
