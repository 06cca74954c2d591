// A warp for each row, a block for each long one; lanes are entries, or columns in vectors that fit them.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-gpu-rows,canonicalize,cse' | filecheck %s

// Few columns: lanes are entries, their sums are added up across the warp.
// CHECK-LABEL: gpu.func @spmm_r32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xindex>, %{{[a-z0-9]*}}: memref<?xf32>, %{{[a-z0-9]*}}: memref<?x?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x?xf32>)
// CHECK-SAME:    kernel.launch = {blocks = 1 : i64, shared = 8192 : i64, threads = 256 : i64, tokens = 32 : i64}
// CHECK:         %[[COLUMNS:.*]] = memref.dim %[[OUT]], %c1
// CHECK:         arith.cmpi ult, %[[COLUMNS]], %c16
// CHECK:         scf.if
// CHECK-COUNT-4:     math.fma
// CHECK-COUNT-5:     gpu.shuffle xor
// Many columns: 32 entries at a time go through the warp's part of shared memory, four loads of x are on their way at once.
// CHECK:         } else {
// CHECK:             scf.for {{.*}} step %c32
// CHECK:               vector.store {{.*}} {alignment = 16 : i64} : memref<8x32x2xi64, #gpu.address_space<workgroup>>, vector<2xi64>
// CHECK:               nvvm.bar.warp.sync
// CHECK-COUNT-4:         vector.load {{.*}} {alignment = 16 : i64} : memref<?xf32, strided<[1]>>, vector<4xf32>
// CHECK:               nvvm.bar.warp.sync
// The parts of a long row meet in shared memory.
// CHECK:             vector.store {{.*}} : memref<8x128xf32, #gpu.address_space<workgroup>>, vector<4xf32>
// CHECK:             gpu.barrier
// CHECK-COUNT-7:       arith.addf
// CHECK:             gpu.barrier
// CHECK:             vector<2xf32>
// CHECK:             vector<1xf32>
// CHECK-LABEL: gpu.func @spmm_r8(
// CHECK-SAME:    kernel.launch = {blocks = 4 : i64, shared = 8192 : i64, threads = 256 : i64, tokens = 8 : i64}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %y = "kernel.gather_rows"(%a, %x) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, vectors = 8 : i64, ahead = 2 : i64, gathers = 0 : i64} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
