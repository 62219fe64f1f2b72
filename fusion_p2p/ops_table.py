# ruff: noqa: E501
"""The reviewed operator table, as text: one line per operator, `name(arguments) cost`.

Argument kinds (`?` allows null, `*` a list):
T tensor, N finite number, X number that may also be inf or -inf, I integer, F finite float, B bool, D dtype,
{a|b} one of these strings. An argument after `/` is given by keyword only. `=` marks an argument that may be left out.
`cost` names the formula in `cost.py`. Reviewed means: functional, shape known without data, no randomness but our
seeded one, no device, file, generator or free string, a FLOPs formula, and no memory beyond what `cost.py` declares.
"""

from __future__ import annotations

OPSET = "fusion-1"

TABLE = """
aten.abs(self:T) ew
aten.acos(self:T) fn
aten.acosh(self:T) fn
aten.adaptive_avg_pool1d(self:T, output_size:I*) pool_in
aten.adaptive_avg_pool2d(self:T, output_size:I*) pool_in
aten.adaptive_avg_pool3d(self:T, output_size:I*) pool_in
aten.adaptive_max_pool2d(self:T, output_size:I*) pool_in
aten.add.Tensor(self:T, other:TN, / alpha=N) ew
aten.add.Scalar(self:T, other:N, alpha=N) ew
aten.addbmm(self:T, batch1:T, batch2:T, / beta=N, alpha=N) addmm
aten.addcdiv(self:T, tensor1:T, tensor2:T, / value=N) ew
aten.addcmul(self:T, tensor1:T, tensor2:T, / value=N) ew
aten.addmm(self:T, mat1:T, mat2:T, / beta=N, alpha=N) addmm
aten.addmv(self:T, mat:T, vec:T, / beta=N, alpha=N) addmm
aten.all(self:T) reduce
aten.all.dim(self:T, dim:I, keepdim=B) reduce
aten.amax(self:T, dim=I*, keepdim=B) reduce
aten.amin(self:T, dim=I*, keepdim=B) reduce
aten.any(self:T) reduce
aten.any.dim(self:T, dim:I, keepdim=B) reduce
aten.arange(start:N, end:N, step:N, dtype:D) create
aten.argmax(self:T, dim=I?, keepdim=B) reduce
aten.argmin(self:T, dim=I?, keepdim=B) reduce
aten.argsort(self:T, dim=I, descending=B) sort
aten.asin(self:T) fn
aten.asinh(self:T) fn
aten.atan(self:T) fn
aten.atan2(self:T, other:T) fn
aten.atanh(self:T) fn
aten.avg_pool1d(self:T, kernel_size:I*, stride=I*, padding=I*, ceil_mode=B, count_include_pad=B) pool
aten.avg_pool2d(self:T, kernel_size:I*, stride=I*, padding=I*, ceil_mode=B, count_include_pad=B, divisor_override=I?) pool
aten.avg_pool3d(self:T, kernel_size:I*, stride=I*, padding=I*, ceil_mode=B, count_include_pad=B, divisor_override=I?) pool
aten.baddbmm(self:T, batch1:T, batch2:T, / beta=N, alpha=N) addmm
aten.binary_cross_entropy(self:T, target:T, weight=T?, reduction=I) fn_in
aten.binary_cross_entropy_with_logits(self:T, target:T, weight=T?, pos_weight=T?, reduction=I) fn_in
aten.bitwise_and.Tensor(self:T, other:TI) ew
aten.bitwise_and.Scalar(self:T, other:I) ew
aten.bitwise_not(self:T) ew
aten.bitwise_or.Tensor(self:T, other:TI) ew
aten.bitwise_or.Scalar(self:T, other:I) ew
aten.bitwise_xor.Tensor(self:T, other:TI) ew
aten.bmm(self:T, mat2:T) matmul
aten.broadcast_tensors(tensors:T*) view
aten.cat(tensors:T*, dim=I) ew
aten.ceil(self:T) ew
aten.celu(self:T, alpha=N) fn
aten.clamp(self:T, min=X?, max=X?) ew
aten.clamp.Tensor(self:T, min=T?, max=T?) ew
aten.clamp_max(self:T, max:X) ew
aten.clamp_min(self:T, min:X) ew
aten.clone(self:T, / memory_format={contiguous|channels_last|preserve}) ew
aten.complex(real:T, imag:T) ew
aten.constant_pad_nd(self:T, pad:I*, value=X) ew
aten.conv1d(input:T, weight:T, bias=T?, stride=I*, padding=I*, dilation=I*, groups=I) conv
aten.conv1d.padding(input:T, weight:T, bias=T?, stride=I*, padding={same|valid}, dilation=I*, groups=I) conv
aten.conv2d(input:T, weight:T, bias=T?, stride=I*, padding=I*, dilation=I*, groups=I) conv
aten.conv2d.padding(input:T, weight:T, bias=T?, stride=I*, padding={same|valid}, dilation=I*, groups=I) conv
aten.conv3d(input:T, weight:T, bias=T?, stride=I*, padding=I*, dilation=I*, groups=I) conv
aten.conv3d.padding(input:T, weight:T, bias=T?, stride=I*, padding={same|valid}, dilation=I*, groups=I) conv
aten.conv_transpose1d(input:T, weight:T, bias=T?, stride=I*, padding=I*, output_padding=I*, groups=I, dilation=I*) conv_t
aten.conv_transpose2d.input(input:T, weight:T, bias=T?, stride=I*, padding=I*, output_padding=I*, groups=I, dilation=I*) conv_t
aten.conv_transpose3d.input(input:T, weight:T, bias=T?, stride=I*, padding=I*, output_padding=I*, groups=I, dilation=I*) conv_t
aten.convolution(input:T, weight:T, bias:T?, stride:I*, padding:I*, dilation:I*, transposed:B, output_padding:I*, groups:I) conv_any
aten.copy(self:T, src:T) ew
aten.copysign.Tensor(self:T, other:T) ew
aten.cos(self:T) fn
aten.cosh(self:T) fn
aten.cosine_embedding_loss(input1:T, input2:T, target:T, margin=F, reduction=I) fn_in
aten.cosine_similarity(x1:T, x2:T, dim=I, eps=F) fn_in
aten.cross_entropy_loss(self:T, target:T, weight=T?, reduction=I, ignore_index=I, label_smoothing=F) softmax
aten.cummax(self:T, dim:I) reduce
aten.cummin(self:T, dim:I) reduce
aten.cumprod(self:T, dim:I, / dtype=D?) reduce
aten.cumsum(self:T, dim:I, / dtype=D?) reduce
aten.diag_embed(self:T, offset=I, dim1=I, dim2=I) ew
aten.diagonal(self:T, offset=I, dim1=I, dim2=I) view
aten.diff(self:T, n=I, dim=I, prepend=T?, append=T?) ew
aten.div.Tensor(self:T, other:TN) ew
aten.div.Scalar(self:T, other:N) ew
aten.div.Tensor_mode(self:T, other:TN, / rounding_mode:{trunc|floor}?) ew
aten.dot(self:T, tensor:T) reduce
aten.elu(self:T, alpha=N, scale=N, input_scale=N) fn
aten.embedding(weight:T, indices:T, padding_idx=I, scale_grad_by_freq=B) ew
aten.eq.Scalar(self:T, other:X) ew
aten.eq.Tensor(self:T, other:T) ew
aten.erf(self:T) fn
aten.erfc(self:T) fn
aten.exp(self:T) fn
aten.exp2(self:T) fn
aten.expand(self:T, size:I*) view
aten.expm1(self:T) fn
aten.eye(n:I, m:I, dtype:D) create
aten.fft_c2c(self:T, dim:I*, normalization:I, forward:B) fft
aten.fft_c2r(self:T, dim:I*, normalization:I, last_dim_size:I) fft
aten.fft_r2c(self:T, dim:I*, normalization:I, onesided:B) fft
aten.fill.Scalar(self:T, value:X) ew
aten.fill.Tensor(self:T, value:T) ew
aten.flatten.using_ints(self:T, start_dim=I, end_dim=I) view
aten.flip(self:T, dims:I*) ew
aten.floor(self:T) ew
aten.floor_divide(self:T, other:TN) ew
aten.fmod.Scalar(self:T, other:N) ew
aten.fmod.Tensor(self:T, other:T) ew
aten.frac(self:T) ew
aten.full(size:I*, fill_value:XB, dtype:D) create
aten.gather(self:T, dim:I, index:T) ew
aten.ge.Scalar(self:T, other:X) ew
aten.ge.Tensor(self:T, other:T) ew
aten.gelu(self:T, / approximate={none|tanh}) fn
aten.glu(self:T, dim=I) fn
aten.group_norm(input:T, num_groups:I, weight=T?, bias=T?, eps=F) norm
aten.gt.Scalar(self:T, other:X) ew
aten.gt.Tensor(self:T, other:T) ew
aten.hardsigmoid(self:T) ew
aten.hardswish(self:T) ew
aten.hardtanh(self:T, min_val=N, max_val=N) ew
aten.hinge_embedding_loss(self:T, target:T, margin=F, reduction=I) fn_in
aten.huber_loss(self:T, target:T, reduction=I, delta=F) fn_in
aten.im2col(self:T, kernel_size:I*, dilation:I*, padding:I*, stride:I*) ew
aten.col2im(self:T, output_size:I*, kernel_size:I*, dilation:I*, padding:I*, stride:I*) reduce
aten.imag(self:T) view
aten.index.Tensor(self:T, indices:T?*) ew
aten.index_add(self:T, dim:I, index:T, source:T, / alpha=N) ew
aten.index_copy(self:T, dim:I, index:T, source:T) ew
aten.index_put(self:T, indices:T?*, values:T, accumulate=B) ew
aten.index_select(self:T, dim:I, index:T) ew
aten.isfinite(self:T) ew
aten.isinf(self:T) ew
aten.isnan(self:T) ew
aten.kl_div(self:T, target:T, reduction=I, / log_target=B) fn_in
aten.l1_loss(self:T, target:T, reduction=I) fn_in
aten.layer_norm(input:T, normalized_shape:I*, weight=T?, bias=T?, eps=F) norm
aten.le.Scalar(self:T, other:X) ew
aten.le.Tensor(self:T, other:T) ew
aten.leaky_relu(self:T, negative_slope=N) ew
aten.lerp.Scalar(self:T, end:T, weight:N) ew
aten.lerp.Tensor(self:T, end:T, weight:T) ew
aten.linalg_matrix_exp(self:T) matexp
aten.linalg_vector_norm(self:T, ord=X, dim=I*?, keepdim=B, / dtype=D?) norm
aten.linear(input:T, weight:T, bias=T?) linear
aten.linspace(start:N, end:N, steps:I, dtype:D) create
aten.log(self:T) fn
aten.log10(self:T) fn
aten.log1p(self:T) fn
aten.log2(self:T) fn
aten.log_sigmoid(self:T) fn
aten.log_softmax.int(self:T, dim:I, dtype=D?) softmax
aten.logaddexp(self:T, other:T) fn
aten.logical_and(self:T, other:T) ew
aten.logical_not(self:T) ew
aten.logical_or(self:T, other:T) ew
aten.logical_xor(self:T, other:T) ew
aten.logsumexp(self:T, dim:I*, keepdim=B) softmax
aten.lt.Scalar(self:T, other:X) ew
aten.lt.Tensor(self:T, other:T) ew
aten.masked_fill.Scalar(self:T, mask:T, value:X) ew
aten.masked_fill.Tensor(self:T, mask:T, value:T) ew
aten.matmul(self:T, other:T) matmul
aten.max(self:T) reduce
aten.max.dim(self:T, dim:I, keepdim=B) reduce
aten.max.other(self:T, other:T) ew
aten.max_pool1d(self:T, kernel_size:I*, stride=I*, padding=I*, dilation=I*, ceil_mode=B) pool
aten.max_pool2d(self:T, kernel_size:I*, stride=I*, padding=I*, dilation=I*, ceil_mode=B) pool
aten.max_pool2d_with_indices(self:T, kernel_size:I*, stride=I*, padding=I*, dilation=I*, ceil_mode=B) pool
aten.max_pool3d(self:T, kernel_size:I*, stride=I*, padding=I*, dilation=I*, ceil_mode=B) pool
aten.maximum(self:T, other:T) ew
aten.mean(self:T, / dtype=D?) reduce
aten.mean.dim(self:T, dim:I*?, keepdim=B, / dtype=D?) reduce
aten.min(self:T) reduce
aten.min.dim(self:T, dim:I, keepdim=B) reduce
aten.min.other(self:T, other:T) ew
aten.minimum(self:T, other:T) ew
aten.mish(self:T) fn
aten.mm(self:T, mat2:T) matmul
aten.movedim.int(self:T, source:I, destination:I) view
aten.mse_loss(self:T, target:T, reduction=I) fn_in
aten.mul.Tensor(self:T, other:TN) ew
aten.mul.Scalar(self:T, other:N) ew
aten.mv(self:T, vec:T) matmul
aten.nan_to_num(self:T, nan=F?, posinf=F?, neginf=F?) ew
aten.narrow(self:T, dim:I, start:I, length:I) view
aten.ne.Scalar(self:T, other:X) ew
aten.ne.Tensor(self:T, other:T) ew
aten.neg(self:T) ew
aten.nll_loss_nd(self:T, target:T, weight=T?, reduction=I, ignore_index=I) fn_in
aten.norm.ScalarOpt_dim(self:T, p:X?, dim:I*, keepdim=B) norm
aten.one_hot(self:T, num_classes:I) ew
aten.pad(self:T, pad:I*, mode={constant|reflect|replicate|circular}, value=X?) ew
aten.permute(self:T, dims:I*) view
aten.pixel_shuffle(self:T, upscale_factor:I) ew
aten.pixel_unshuffle(self:T, downscale_factor:I) ew
aten.polar(abs:T, angle:T) fn
aten.pow.Scalar(self:N, exponent:T) fn
aten.pow.Tensor_Scalar(self:T, exponent:N) fn
aten.pow.Tensor_Tensor(self:T, exponent:T) fn
aten.prelu(self:T, weight:T) ew
aten.prod(self:T, / dtype=D?) reduce
aten.prod.dim_int(self:T, dim:I, keepdim=B, / dtype=D?) reduce
aten.real(self:T) view
aten.reciprocal(self:T) ew
aten.reflection_pad1d(self:T, padding:I*) ew
aten.reflection_pad2d(self:T, padding:I*) ew
aten.relu(self:T) ew
aten.relu6(self:T) ew
aten.remainder.Scalar(self:T, other:N) ew
aten.remainder.Tensor(self:T, other:T) ew
aten.repeat(self:T, repeats:I*) ew
aten.repeat_interleave.self_int(self:T, repeats:I, dim=I?, / output_size=I?) ew
aten.replication_pad1d(self:T, padding:I*) ew
aten.replication_pad2d(self:T, padding:I*) ew
aten.reshape(self:T, shape:I*) view
aten.rms_norm(input:T, normalized_shape:I*, weight=T?, eps=F?) norm
aten.roll(self:T, shifts:I*, dims=I*) ew
aten.round(self:T) ew
aten.rsqrt(self:T) fn
aten.rsub.Scalar(self:T, other:N, alpha=N) ew
aten.scalar_tensor(value:X, dtype:D) create
aten.scaled_dot_product_attention(query:T, key:T, value:T, attn_mask=T?, dropout_p=Z, is_causal=B, / scale=F?, enable_gqa=B) sdpa
aten.scatter.src(self:T, dim:I, index:T, src:T) ew
aten.scatter.value(self:T, dim:I, index:T, value:X) ew
aten.scatter_add(self:T, dim:I, index:T, src:T) ew
aten.scatter_reduce.two(self:T, dim:I, index:T, src:T, reduce:{sum|prod|mean|amax|amin}, / include_self=B) ew
aten.select.int(self:T, dim:I, index:I) view
aten.select_scatter(self:T, src:T, dim:I, index:I) ew
aten.selu(self:T) fn
aten.sigmoid(self:T) fn
aten.sign(self:T) ew
aten.silu(self:T) fn
aten.sin(self:T) fn
aten.sinh(self:T) fn
aten.slice.Tensor(self:T, dim=I, start=I?, end=I?, step=I) view
aten.slice_scatter(self:T, src:T, dim=I, start=I?, end=I?, step=I) ew
aten.smooth_l1_loss(self:T, target:T, reduction=I, beta=F) fn_in
aten.soft_margin_loss(self:T, target:T, reduction=I) fn_in
aten.softmax.int(self:T, dim:I, dtype=D?) softmax
aten.softplus(self:T, beta=N, threshold=N) fn
aten.sort(self:T, dim=I, descending=B) sort
aten.split.Tensor(self:T, split_size:I, dim=I) view
aten.split_with_sizes(self:T, split_sizes:I*, dim=I) view
aten.sqrt(self:T) fn
aten.square(self:T) ew
aten.squeeze(self:T) view
aten.squeeze.dim(self:T, dim:I) view
aten.squeeze.dims(self:T, dim:I*) view
aten.stack(tensors:T*, dim=I) ew
aten.std.correction(self:T, dim=I*?, / correction=N?, keepdim=B) norm
aten.sub.Tensor(self:T, other:TN, / alpha=N) ew
aten.sub.Scalar(self:T, other:N, alpha=N) ew
aten.sum(self:T, / dtype=D?) reduce
aten.sum.dim_IntList(self:T, dim:I*?, keepdim=B, / dtype=D?) reduce
aten.t(self:T) view
aten.take_along_dim(self:T, indices:T, dim=I?) ew
aten.tan(self:T) fn
aten.tanh(self:T) fn
aten.threshold(self:T, threshold:N, value:N) ew
aten.to.dtype(self:T, dtype:D) ew
aten.topk(self:T, k:I, dim=I, largest=B, sorted=B) sort
aten.trace(self:T) reduce
aten.transpose.int(self:T, dim0:I, dim1:I) view
aten.tril(self:T, diagonal=I) ew
aten.triu(self:T, diagonal=I) ew
aten.trunc(self:T) ew
aten.unbind.int(self:T, dim=I) view
aten.unflatten.int(self:T, dim:I, sizes:I*) view
aten.unfold(self:T, dimension:I, size:I, step:I) view
aten.unsqueeze(self:T, dim:I) view
aten.upsample_bicubic2d.vec(input:T, output_size:I*?, align_corners:B, scale_factors:F*?) upsample
aten.upsample_bilinear2d.vec(input:T, output_size:I*?, align_corners:B, scale_factors:F*?) upsample
aten.upsample_linear1d.vec(input:T, output_size:I*?, align_corners:B, scale_factors:F*?) upsample
aten.upsample_nearest1d.vec(input:T, output_size:I*?, scale_factors:F*?) upsample
aten.upsample_nearest2d.vec(input:T, output_size:I*?, scale_factors:F*?) upsample
aten.upsample_nearest3d.vec(input:T, output_size:I*?, scale_factors:F*?) upsample
aten.upsample_trilinear3d.vec(input:T, output_size:I*?, align_corners:B, scale_factors:F*?) upsample
aten.var.correction(self:T, dim=I*?, / correction=N?, keepdim=B) norm
aten.var_mean.correction(self:T, dim=I*?, / correction=N?, keepdim=B) norm
aten.view_as_complex(self:T) view
aten.view_as_real(self:T) view
aten.where.Scalar(condition:T, self:X, other:X) ew
aten.where.ScalarOther(condition:T, self:T, other:X) ew
aten.where.ScalarSelf(condition:T, self:X, other:T) ew
aten.where.self(condition:T, self:T, other:T) ew
aten.xlogy.Tensor(self:T, other:T) fn
fusion.alpha_dropout(x:T, p:F) seeded
fusion.batch_norm(x:T, weight:T?, bias:T?, running_mean:T, running_var:T, momentum:F, eps:F) norm
fusion.batch_norm_frozen(x:T, weight:T?, bias:T?, running_mean:T, running_var:T, eps:F) norm
fusion.batch_norm_local(x:T, weight:T?, bias:T?, eps:F) norm
fusion.bernoulli(prob:T) seeded
fusion.bernoulli_like(x:T, p:F) seeded
fusion.by_mode(train:T, eval:T) view
fusion.detach(x:T) view
fusion.dropout(x:T, p:F) seeded
fusion.feature_alpha_dropout(x:T, p:F) seeded
fusion.feature_dropout(x:T, p:F) seeded
fusion.gru(x:T*, state:T*, weights:T*, biases:B, layers:I, both:B, first:B) rnn
fusion.lstm(x:T*, state:T*, weights:T*, biases:B, layers:I, both:B, first:B) rnn
fusion.rnn_relu(x:T*, state:T*, weights:T*, biases:B, layers:I, both:B, first:B) rnn
fusion.rnn_tanh(x:T*, state:T*, weights:T*, biases:B, layers:I, both:B, first:B) rnn
fusion.rand(size:I*, dtype:D) seeded
fusion.randint(low:I, high:I, size:I*, dtype:D) seeded
fusion.randn(size:I*, dtype:D) seeded
fusion.sdpa(query:T, key:T, value:T, attn_mask:T?, p:F, is_causal:B, scale:F?, enable_gqa:B) sdpa
"""


def words(text: str) -> frozenset[str]:
    """The names in a text table."""
    return frozenset(text.split())
