// Each warp has pairs of its own; their sums meet in shared memory.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-convolve-points-grad,canonicalize,cse' | filecheck %s

// CHECK-LABEL: gpu.func @region_o1(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf64>, %[[G:[a-z0-9]*]]: memref<?x?xf64>, %[[IN:[a-z0-9]*]]: memref<?xi32>, %[[OUT:[a-z0-9]*]]: memref<?xi32>
// CHECK:         scf.for {{.*}} step %c16
// CHECK:           scf.for {{.*}} step %c8 iter_args
// CHECK:             memref.load %[[IN]]
// CHECK:             memref.load %[[OUT]]
// CHECK:             memref.load %[[G]]
// CHECK-COUNT-4:     vector.load %[[X]]{{.*}} vector<2xf64>
// CHECK-COUNT-8:     math.fma
// CHECK-COUNT-8:   memref.store {{.*}} memref<8x8x32xf64, #gpu.address_space<workgroup>>
// CHECK:           gpu.barrier
// CHECK-COUNT-8:   memref.load {{.*}} memref<8x8x32xf64, #gpu.address_space<workgroup>>
// CHECK-COUNT-7:   arith.addf
// CHECK:           gpu.barrier
func.func @region(%x: tensor<?x?xf64>, %g: tensor<?x?xf64>, %i: tensor<?xi32>, %o: tensor<?xi32>, %p: tensor<?x?xi32>) -> tensor<?x?x?xf64> {
  %w = "kernel.convolve_points_grad"(%x, %g, %i, %o, %p) : (tensor<?x?xf64>, tensor<?x?xf64>, tensor<?xi32>, tensor<?xi32>, tensor<?x?xi32>) -> tensor<?x?x?xf64>
  return %w : tensor<?x?x?xf64>
}
