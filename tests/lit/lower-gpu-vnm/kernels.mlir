// The kernels for many tokens and for fewer.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-vnm,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// With groups of 16, half of a panel's x goes through registers at a time: loaded before products of the panel in hand, stored
// after, only the columns that are left. Products take them by transposing loads.
// CHECK-LABEL: gpu.func @rows_t128(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 51200 : i64, threads = 256 : i64, tokens = 128 : i64}
// CHECK:         scf.for
// CHECK:           vector.load {{.*}} vector<8xbf16>
// CHECK:           vector.load {{.*}} vector<8xi8>
// CHECK:         nvvm.cp.async.wait.group 0
// CHECK:         gpu.barrier
// CHECK:         scf.for
// CHECK:           nvgpu.device_async_copy
// CHECK:           nvvm.cp.async.commit.group
// CHECK-COUNT-8:   vector.load {{.*}} {alignment = 16 : i64} : memref<?x520xbf16>, vector<8xbf16>
// CHECK-COUNT-4:   nvgpu.ldmatrix {{.*}} {numTiles = 4 : i32, transpose = true}
// CHECK-COUNT-16:  nvvm.mma.sp.sync
// CHECK:           arith.cmpi ult, %{{.*}}, %c4
// CHECK:           vector.store {{.*}} memref<2x1x64x128xbf16, #gpu.address_space<workgroup>>, vector<2xbf16>
// CHECK-COUNT-16:  nvvm.mma.sp.sync
// CHECK:           nvvm.cp.async.wait.group 0
// CHECK-NEXT:      gpu.barrier
// CHECK:         vector.store {{.*}} : memref<?x136xbf16>, vector<8xbf16>
// CHECK-LABEL: gpu.func @rows_t64(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 34816 : i64, threads = 128 : i64, tokens = 64 : i64}
func.func @rows(%x: tensor<?x520xbf16>, %w: tensor<136x520xbf16, "vnm(reduction=1, rows=128, group=16)">) -> tensor<?x136xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-vnm", tile = [128, 128, 64]} : (tensor<?x520xbf16>, tensor<136x520xbf16, "vnm(reduction=1, rows=128, group=16)">) -> tensor<?x136xbf16>
  return %y : tensor<?x136xbf16>
}

// -----

// expected-error@unknown {{tile [64, 128, 64] is not [128, 128, 64]}}
func.func @tile(%x: tensor<?x520xbf16>, %w: tensor<136x520xbf16, "vnm(reduction=1, rows=128, group=16)">) -> tensor<?x136xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-vnm", tile = [64, 128, 64]} : (tensor<?x520xbf16>, tensor<136x520xbf16, "vnm(reduction=1, rows=128, group=16)">) -> tensor<?x136xbf16>
  return %y : tensor<?x136xbf16>
}
