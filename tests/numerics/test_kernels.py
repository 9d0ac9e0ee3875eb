"""kernels: what it needs on a CPU, how kernels are told apart, and a GPU run where there is one."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.numerics.kernels import kernels, kind_of, summed

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_on_a_cpu_it_says_what_it_would_need():
    with pytest.raises(OptionError, match=r"this torch sees no CUDA device.*compute capability 7\.0"):
        kernels(fxamp.convert(nn.Linear(8, 8), torch.float16, (X,)), (X,))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "tensor core gemm"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64", "tensor core gemm"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "tensor core gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu>", "tensor core gemm"),
        ("ampere_sgemm_128x64_tn", "other gemm"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>", "other gemm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "other"),
    ],
)
def test_kernels_are_told_by_name(name, kind):
    assert kind_of(name, None) == kind


def test_times_are_summed_by_node_and_casts_are_told_by_node():
    model = fxamp.convert(nn.Linear(8, 8), torch.float16, (X,))
    nodes = {node.name: node for node in model._fxamp_engine.all_variants()[0].graph.nodes}
    found = summed([("to", "copy", 2.0), ("linear", "sgemm", 8.0), ("to", "copy", 4.0)], nodes, 2)
    assert [(k.node, k.kind, k.microseconds) for k in found] == [("linear", "other gemm", 4.0), ("to", "cast", 3.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensor_cores_run_a_low_gemm():
    model = nn.Sequential(nn.Linear(1024, 1024)).cuda()
    x = torch.randn(1024, 1024, device="cuda")
    found = kernels(fxamp.convert(model, torch.float16, (x,)), (x,))
    assert found.tensor_core_share == 1.0 and "Tensor Cores" in str(found)
