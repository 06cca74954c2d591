// Eight lanes for an entry, four entries of a group at a time; sums of narrow floats in f32.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-gpu-dots,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: gpu.func @sddmm_e256(
// CHECK-SAME:    kernel.launch = {blocks = 1 : i64, shared = 4096 : i64, threads = 256 : i64, tokens = 256 : i64}
// CHECK:         scf.while
// CHECK:           arith.cmpi ule
// CHECK:         vector.store {{.*}} : memref<256x2xi64, #gpu.address_space<workgroup>>, vector<2xi64>
// CHECK:         nvvm.bar.warp.sync
// CHECK:         scf.for {{.*}} to %c8 step %c4 iter_args(%{{.*}}) -> (f32)
// CHECK-COUNT-4:   vector.load {{.*}} : memref<256x2xi64, #gpu.address_space<workgroup>>, vector<2xi64>
// CHECK:           scf.for {{.*}} step %c64
// CHECK:             vector.load {{.*}} {alignment = 16 : i64} : memref<?x?xbf16>, vector<8xbf16>
// CHECK:             arith.mulf {{.*}} fastmath<reassoc,contract> : vector<8xf32>
// CHECK:             arith.select {{.*}} : vector<8xf32>
// CHECK:           vector.reduction <add>
// CHECK-COUNT-3:   gpu.shuffle xor
// CHECK:         arith.truncf {{.*}} : f32 to bf16
// CHECK:         memref.store {{.*}} : memref<?xbf16>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @sddmm(%s: tensor<?x?xbf16, #CSR>, %x: tensor<?x?xbf16>, %y: tensor<?x?xbf16>) -> tensor<?xbf16> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xbf16>) -> bf16
    %1 = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (j, k)>} : (tensor<?x?xbf16>) -> bf16
    %2 = arith.extf %0 : bf16 to f32
    %3 = arith.extf %1 : bf16 to f32
    %4 = arith.mulf %2, %3 fastmath<reassoc,contract> : f32
    "kernel.yield"(%4) : (f32) -> ()
  }) {reduced = 1 : i64, lanes = 32 : i64, together = 4 : i64} : (tensor<?x?xbf16, #CSR>) -> tensor<?xbf16>
  return %v : tensor<?xbf16>
}

// -----

// expected-error@unknown {{together = 3 does not divide the 8 entries of a group of lanes}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @together(%s: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>) -> tensor<?xf32> {
  %v = "kernel.sample"(%s) ({
    %0 = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {reduced = 1 : i64, lanes = 32 : i64, together = 3 : i64} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
  return %v : tensor<?xf32>
}
