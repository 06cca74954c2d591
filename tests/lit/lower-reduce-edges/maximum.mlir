// A row at a time: its maxima stay in registers, and a row without entries gives 0.
// RUN: gossamer-opt %s -p 'expose-storage{arrays=true},lower-reduce-edges' | filecheck %s

// CHECK-LABEL: func.func @maximum(
// CHECK:         scf.parallel
// CHECK-COUNT-2:   scf.while
// CHECK:           scf.for %[[ROW:[a-z0-9]*]] =
// CHECK:             %[[EMPTY:.*]] = arith.cmpi eq
// CHECK:             %[[FOUND:.*]]:2 = scf.for {{.*}} -> (vector<16xf32>, vector<16xf32>)
// CHECK-COUNT-2:       vector.maskedload {{.*}} : memref<?x18xf32>
// CHECK-COUNT-2:       arith.maximumf
// CHECK:             %[[FIRST:.*]] = arith.select %[[EMPTY]], %{{.*}}, %[[FOUND]]#0
// CHECK:             vector.maskedstore %{{.*}}[%[[ROW]], %{{.*}}], %{{.*}}, %[[FIRST]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @maximum(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x18xf32>) -> tensor<?x18xf32> {
  %y = "kernel.reduce_edges"(%a) ({
    %0 = "kernel.read"(%x) {map = affine_map<(r, c, f) -> (c, f)>} : (tensor<?x18xf32>) -> f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {kind = "max"} : (tensor<?x?xf32, #CSR>) -> tensor<?x18xf32>
  return %y : tensor<?x18xf32>
}
