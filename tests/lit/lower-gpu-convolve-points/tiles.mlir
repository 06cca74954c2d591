// A thread block for each tile of outputs; a lane is a filter, a warp takes eight pairs of an offset at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-convolve-points,canonicalize,cse' | filecheck %s

// CHECK-LABEL: gpu.func @region_r256(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[W:[a-z0-9]*]]: memref<?x?x?xf32>, %[[B:[a-z0-9]*]]: memref<?xf32>, %[[IN:[a-z0-9]*]]: memref<?xi32>, %[[OUT:[a-z0-9]*]]: memref<?xi32>, %[[ROWS:[a-z0-9]*]]: memref<?xi32>
// CHECK-SAME:    threads = 256 : i64, tokens = 256 : i64
// CHECK:         scf.for {{.*}} step %c32
// CHECK:           memref.load %[[B]]
// CHECK:           memref.load %[[ROWS]]
// CHECK:           scf.for
// CHECK:             gpu.barrier
// CHECK:             scf.for {{.*}} step %c64
// CHECK-COUNT-8:       memref.load %[[IN]]
// CHECK-COUNT-8:       memref.load %[[OUT]]
// CHECK:               scf.for {{.*}} step %c4 iter_args
// CHECK-COUNT-8:         vector.load %[[X]]{{.*}} vector<4xf32>
// CHECK:                 memref.load %[[W]]
// CHECK-COUNT-8:         math.fma
// CHECK-LABEL: gpu.func @region_c4(
func.func @region(%x: tensor<?x?xf32>, %w: tensor<?x?x?xf32>, %b: tensor<?xf32>, %i: tensor<?xi32>, %o: tensor<?xi32>, %r: tensor<?xi32>, %p: tensor<?x?xi32>) -> tensor<?x?xf32> {
  %y = "kernel.convolve_points"(%x, %w, %b, %i, %o, %r, %p) : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xi32>, tensor<?xi32>, tensor<?x?xi32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
