"""kernels: what it needs on a CPU, how kernels are told apart, and a GPU run where there is one."""

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

import fxamp
from fxamp.counting.zoo.language import Bert
from fxamp.errors import OptionError
from fxamp.numerics.kernels import Kernels, _kernel_times, kernels, kind_of, summed

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_on_a_cpu_it_says_what_it_would_need():
    with pytest.raises(OptionError, match=r"this torch sees no CUDA device.*compute capability 7\.0"):
        kernels(fxamp.convert(nn.Linear(8, 8), torch.float16, (X,)), (X,))


# Where such names stand in public:
# NVIDIA's own lists of instruction shapes and families: the pattern table of TensorFlow's kernel_stats_utils.cc
# (h884, s884, h1688, s1688, 16816, i8816, i16832, hmma, xmma_gemm), the kernel lists of apex's pyprof prof/conv.py
# (_s884cudnn_, _s1688cudnn_, _scudnn_, nchwToNhwc, OffsetsKernel, scaleTensor_kernel) and CUTLASS's profiler.md;
# ampere_bf16_s16816gemm, ampere_bf16_s1688gemm: karpathy/nanochat pull request 105;
# cutlass_75_tensorop_bf16_s1688gemm: NVIDIA/cutlass issue 2286; s1688tf32gemm: NVIDIA/cutlass issue 999;
# sm90_xmma_fprop_implicit_gemm ... __5x_cudnn: pytorch/kineto issue 1041;
# epilogue::impl::globalKernel: apex's pyprof; FlashAttn{FwdCombine,BwdPreprocess,BwdPostprocessConvertdQ}: hopper/ of
# Dao-AILab/flash-attention; triton_for: the tests of torch's Inductor, test_kernel_names;
# sm90_xmma_gemm ... __5x_cublas: NVIDIA/TensorRT-LLM issue 1541; nvjet_sm90_hss: GindaChen/nsys-ai pull request 582.
TENSOR_CORE = """
volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn
volta_h884gemm_256x64_ldg8_nn
turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_nt
ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn
ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn
ampere_h16816gemm_128x128_ldg8_stages_32x5_tn
sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16_kernel
sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas
sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_tensor16x8x8
sm90_xmma_dgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_cudnn
xmma_cudnn::gemm::kernel<xmma_cudnn::implicit_gemm::wgrad_indexed::Kernel_traits<Ampere_hmma_fp32_traits>>
void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x128_32x5_tn_align8>(Params)
void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)
void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_128x128_32x5_nhwc_align8>(Params)
cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_void_f16_128x128x64_2x1x1_0_tnn_align8_warpspecialized
void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<MainloopSm90TmaGmmaWarpSpecialized<4>>>(Params)
nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT
nvjet_tst_192x16_64x8_2x2_2cta_h_bz_TNT
void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::half_t>>(Params)
void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, cutlass::bfloat16_t>>(P)
fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)
fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)
cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_128x128x64_4x1x1_kernel0_0
cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1
cutlass_tensorop_s1688tf32gemm_256x128_16x3_nn_align4
volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1
turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_interior_nhwc_tn_v1
turing_h1688cudnn_256x64_sliced1x2_ldg8_relu_exp_small_nhwc_tn_v1
ampere_fp16_s16816cudnn_fp16_128x128_ldg8_relu_f2f_exp_interior_nhwc_tn_v1
sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1__5x_cudnn
sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x32_stage5_warpsize2x2x1_tensor16x8x8_execute_kernel__5x_cublas
nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_TNT
nvjet_sm100_tst_64x32_64x16_2x1_2cta_v_bz_splitK_TNT
void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>
void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<256, 64, 64, 4, false, false, cutlass::bfloat16_t>>(P)
void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<MainloopSm100TmaUmmaWarpSpecialized<4>>>(Params)
void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm<LinearCombinationGenericElementwise>>(Params)
ampere_fp16_s16816gemm_fp16_256x128_ldg8_f2f_stages_64x3_tn
sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize64x64x64_stage3_warpsize2x2x1_tensor16x8x16_kernel
sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x64_stage4_warpsize2x2x1_tensor16x8x32_kernel
sm75_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage1_warpsize2x2x1_g1_tensor16x8x8_kernel
void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_256x128_32x3_nhwc_align8>(Params)
cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0
cudnn_generated_oss_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0
cudnn_generated_fort_native_sdpa_sm80_flash_fprop_f16_knob_11_128x64x64_4x1x1_kernel0_0
void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>>(Params)
""".split("\n")[1:-1]
PLAIN = """
ampere_sgemm_128x64_tn
volta_sgemm_64x64_nt
volta_fp16_sgemm_fp16_128x32_nn
void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)
sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x64x8_stage3_warpsize2x2x1_g1_ffma_aligna4
void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int)
void cudnn::winograd_nonfused::winogradForwardFilter4x4<float, float>(WinogradFilterParams)
void cudnn::cnn::wgrad2d_grouped_direct_kernel<false, true, int, float, float, float>(cudnnTensorStruct)
void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::Half, int>(PackedTensorAccessor)
void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(cublasGemvParams)
void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(cublasGemmSmallNParams)
fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)
void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*)
ampere_sgemm_32x32_sliced1x4_nn
ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1
cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1
_5x_cudnn_ampere_scudnn_128x32_relu_interior_nn_v1
sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_execute_kernel__5x_cublas
void precomputed_convolve_sgemm<float, 1024, 5, 5, 4, 3, 3, 1, false>(int, int, int, float const*, int)
void gemv2N_kernel<int, int, float, float, float, float, 128, 16, 4, 4, 1, false>(cublasGemvParams)
void cutlass::Kernel<cutlass::gemm::kernel::Gemm<MmaPipelined<float, OpClassSimt>>>(Params)
volta_sgemm_32x32_sliced1x4_tn
void conv2d_c1_k1_nhwc_kernel_specialized<__half, __half, __half, float, 3, 1, 8, 3>(Params)
void gemmk1_kernel<int, float, 256, 5, true, false, false, false>(cublasGemmk1Params<float>)
void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*)
""".split("\n")[1:-1]
OTHER = """
void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul>>
void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float, __half, true, false, false>(Params)
void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>(nchw2nhwc_params_t)
void cudnn::ops::convertTensor_kernel<float, __half, float>(float, __half const*, float*)
void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, cutlass::half_t>>(Flash_bwd_params)
void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, cutlass::half_t>>(Flash_bwd_params, int)
cask__5x_cudnn::computeOffsetsKernel(cask__5x_cudnn::ComputeOffsetsParams)
void at::native::im2col_kernel<float>(long, float const*, long, long)
void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 9, false, false>(c10::Half*)
void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel_32x32<c10::Half, float>(long, long)
void elemWiseRNNcell<__half, __half, float, (cudnnRNNMode_t)2>(int, int, int)
void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>
void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>
Memcpy DtoD (Device -> Device)
Memset (Device)
void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<256, 64, 64, 4, cutlass::bfloat16_t>>(P)
triton_poi_fused__scaled_dot_product_flash_attention_clone_3
triton_red_fused_convolution_native_batch_norm_relu_1
void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::convolution_add<float>>>(int)
void cudnn::ops::scaleTensor_kernel<float>(cudnnTensorStruct, float*, float)
void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half2, float, 512, true, 1, true>(cudnnTensorStruct)
void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, at::native::CopyFunctor<c10::Half>>
void cunn_SoftMaxForward<8, c10::Half, float, c10::Half, at::native::SoftMaxForwardEpilogue>(c10::Half*)
void cublasLt::epilogue::impl::globalKernel<8, 32, float, __half, __half, true, true, 1>(int, cublasLtEpilogue_t)
void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<64>>, cutlass::bfloat16_t>>(Params)
void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<cute::C<64>>, cutlass::half_t>>(Params)
void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<64>>, cutlass::bfloat16_t>>(Params)
void cudnn::fusion::compute_dot_do_o_specialized<true, 128, 128>(AttentionParams)
void cudnn::fusion::convert_dq_to_16bits<true, 128>(Params)
triton_for_fused_convolution_1
triton_unk_fused_mm_addmm_2
void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<2u>, unsigned int, 4, 64, 64>
ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
""".split("\n")[1:-1]
KINDS = [
    *((name, "tensor core gemm") for name in TENSOR_CORE),
    *((name, "other gemm") for name in PLAIN),
    *((name, "other") for name in OTHER),
]


@pytest.mark.parametrize("name, kind", KINDS, ids=[name[:60] for name, _ in KINDS])
def test_kernels_are_told_by_name(name, kind):
    assert kind_of(name, None) == kind


@pytest.mark.parametrize("overrides, kind", [({}, "tensor core gemm"), ({"*": "deny"}, "other gemm")])
def test_a_triton_template_is_told_by_its_nodes_precision(overrides, kind):
    model = fxamp.convert(nn.Linear(8, 8), torch.float16, (X,), overrides=overrides)
    nodes = {node.name: node for node in model._fxamp_engine.all_variants()[0].graph.nodes}
    assert kind_of("triton_tem_fused_addmm_0", nodes["linear"]) == kind


def test_times_are_summed_by_node_and_casts_are_told_by_node():
    model = fxamp.convert(nn.Linear(8, 8), torch.float16, (X,))
    nodes = {node.name: node for node in model._fxamp_engine.all_variants()[0].graph.nodes}
    found = summed([("to", "copy", 2.0), ("linear", "sgemm", 8.0), ("to", "copy", 4.0)], nodes, 2)
    assert [(k.node, k.kind, k.microseconds) for k in found] == [("linear", "other gemm", 4.0), ("to", "cast", 3.0)]


def cpu_event(number, name, start, end, **more):
    """As torch's profiler makes them of what Kineto recorded on the host."""
    return FunctionEvent(
        number, name, thread=1, start_us=start, end_us=end, use_device="cuda", device_type=DeviceType.CPU, **more
    )


def profiled():
    """One forward: a cast, a GEMM whose op launches two kernels, one outside of every node, and what is on the GPU."""
    launched = {
        "copy": cpu_event(3, "aten::copy_", 12, 18),
        "gemm": cpu_event(6, "aten::addmm", 32, 48),
        "stray": cpu_event(9, "aten::fill_", 95, 98),
    }
    launched["copy"].append_kernel("void at::native::unrolled_elementwise_kernel<direct_copy>", 0, 4.0)
    launched["gemm"].append_kernel("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", 0, 20.0)
    launched["gemm"].append_kernel("void cublasLt::splitKreduce_kernel<32, 16>(Params)", 0, 1.0)
    launched["stray"].append_kernel("Memset (Device)", 0, 1.0)
    regions = [
        cpu_event(1, "fxamp::to", 10, 20, is_user_annotation=True),
        cpu_event(2, "aten::to", 11, 19),
        cpu_event(4, "fxamp::linear", 30, 50, is_user_annotation=True),
        cpu_event(5, "aten::linear", 31, 49),
    ]
    on_gpu = [
        FunctionEvent(number, name, thread=0, start_us=start, end_us=end, use_device="cuda",
                      device_type=DeviceType.CUDA, is_user_annotation=name.startswith("fxamp::"))
        for number, name, start, end in (
            (4, "fxamp::linear", 60, 81), (20, "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", 60, 80),
        )
    ]  # fmt: skip
    events = EventList([*regions, *launched.values(), *on_gpu], use_device="cuda")
    events._build_tree()
    return events


def test_kernels_go_to_the_node_that_launched_them():
    """Through torch's own event classes: ops nest on the host, kernels hang on the op that launched them, and the
    regions that the GPU's timeline repeats count nothing a second time."""
    found = _kernel_times(profiled())
    assert sorted((node, kernel.split("<")[0].split("_")[0], spent) for node, kernel, spent in found) == [
        ("", "Memset (Device)", 1.0),
        ("linear", "nvjet", 20.0),
        ("linear", "void cublasLt::splitKreduce", 1.0),
        ("to", "void at::native::unrolled", 4.0),
    ]


def test_the_share_counts_gemms_only():
    model = fxamp.convert(nn.Linear(8, 8), torch.float16, (X,))
    nodes = {node.name: node for node in model._fxamp_engine.all_variants()[0].graph.nodes}
    made = Kernels("a GPU", tuple(summed(_kernel_times(profiled()), nodes, 1)))
    assert made.tensor_core_share == 1.0
    assert str(made).startswith("a GPU: 100.0% of GEMM time in Tensor Cores")
    assert {kernel.kind for kernel in made.kernels} == {"tensor core gemm", "cast", "other"}


def test_a_run_without_kernels_says_that_nothing_was_timed():
    assert "no kernel was recorded" in str(Kernels("a GPU", ()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensor_cores_run_a_low_gemm():
    model = nn.Sequential(nn.Linear(1024, 1024)).cuda()
    x = torch.randn(1024, 1024, device="cuda")
    found = kernels(fxamp.convert(model, torch.float16, (x,)), (x,))
    assert found.tensor_core_share == 1.0 and "Tensor Cores" in str(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_of_a_whole_model_have_nodes_and_lines(dtype):
    """What is not GEMM in float32 by its own choice (a mask, a sum of embeddings) is there too, with its line."""
    with torch.device("cuda"):
        model = Bert(1000, 256, 2, 4, 64)
        x = (torch.randint(1000, (8, 64)), torch.zeros(8, 64, dtype=torch.long), torch.ones(8, 64))
    converted = fxamp.convert(model, dtype, x)
    found = kernels(converted, x)
    nodes = {row.name: row for row in fxamp.report(converted).rows}
    gemms = [kernel for kernel in found.kernels if kernel.kind.endswith("gemm")]
    ops = {nodes[kernel.node].op for kernel in gemms}
    assert {"linear", "scaled_dot_product_attention"} <= ops, found
    assert all("language.py:" in kernel.source for kernel in gemms), found
    assert found.tensor_core_share > 0.9, found
    assert {nodes[kernel.node].precision for kernel in gemms if kernel.kind == "tensor core gemm"} == {"low"}, found
    named = sum(kernel.microseconds for kernel in found.kernels if kernel.node in nodes)
    assert named > 0.95 * sum(kernel.microseconds for kernel in found.kernels), found
    assert any(kernel.kind == "cast" for kernel in found.kernels), found
