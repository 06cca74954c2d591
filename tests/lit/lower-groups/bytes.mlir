// An entry of two groups of 8 bits is two vectors, which follow each other.
// RUN: gossamer-opt %s -p 'expose-storage,lower-groups,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_rows2(
// CHECK:         %[[BYTES:.*]] = vector.load %{{.*}} : memref<?xi8>, vector<16xi8>
// CHECK:         %[[FLOATS:.*]] = arith.sitofp %[[BYTES]] : vector<16xi8> to vector<16xf32>
// CHECK:         %[[W:.*]] = arith.mulf %[[FLOATS]],
// CHECK-COUNT-2: vector.fma %[[W]],
// CHECK:         scf.yield
func.func @region(%x: tensor<?x70xf32>, %w: tensor<40x70xf32, "groups(reduction=1, bits=8, places=8, scale=16)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "groups", tile = [2]} : (tensor<?x70xf32>, tensor<40x70xf32, "groups(reduction=1, bits=8, places=8, scale=16)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
