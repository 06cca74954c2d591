// The kernels for sixteen tokens and for eight.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-expand,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// Two panels are on their way when the loop begins. In it, a lane takes its two elements of each quarter of a tile from the
// packed values: where they are follows from the mask's bits below its own, and whether they are from the mask.
// CHECK-LABEL: gpu.func @rows_t16(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 78720 : i64, threads = 256 : i64, tokens = 16 : i64}
// CHECK-COUNT-2: nvvm.cp.async.commit.group
// CHECK:         scf.for
// CHECK:           nvvm.bar.warp.sync
// CHECK:           nvgpu.device_async_copy
// CHECK:           nvvm.cp.async.commit.group
// CHECK:           nvvm.cp.async.wait.group 2
// CHECK-NEXT:      nvvm.bar.warp.sync
// CHECK-COUNT-2:   nvgpu.ldmatrix
// CHECK:           %[[MASKS:.*]] = vector.load {{.*}} vector<4xi32>
// CHECK:           %[[OFFSETS:.*]] = vector.load {{.*}} vector<4xi16>
// CHECK:           llvm.intr.ctpop
// CHECK:           arith.select %{{.*}}, %{{.*}}, %{{.*}} : bf16
// CHECK:           nvvm.mma.sync {{.*}}shape = #nvvm.shape<m = 16, n = 8, k = 16>
// CHECK:         gpu.barrier
// CHECK:         memref.store {{.*}} #gpu.address_space<workgroup>
// CHECK:         gpu.barrier
// CHECK:         vector.store {{.*}} : memref<?x40xbf16>, vector<2xbf16>
// CHECK-LABEL: gpu.func @rows_t8(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 66432 : i64, threads = 256 : i64, tokens = 8 : i64}
func.func @rows(%x: tensor<?x304xbf16>, %w: tensor<40x304xbf16, "fragments(reduction=1)">) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-expand", tile = [16, 32, 32]} : (tensor<?x304xbf16>, tensor<40x304xbf16, "fragments(reduction=1)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}

// -----

// expected-error@unknown {{tile [16, 32, 64] is not [16, 32, 32]}}
func.func @tile(%x: tensor<?x304xbf16>, %w: tensor<40x304xbf16, "fragments(reduction=1)">) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-expand", tile = [16, 32, 64]} : (tensor<?x304xbf16>, tensor<40x304xbf16, "fragments(reduction=1)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
