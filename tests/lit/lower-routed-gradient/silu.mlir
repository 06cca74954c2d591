// What an activation gets goes back through it: gates and ups that were kept, the derivative of silu, shares of 16 rows.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-gradient' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_many6
// CHECK-COUNT-2:   vector.maskedload
// CHECK:           math.exp
// CHECK-COUNT-3:   vector.maskedstore
// CHECK:           memref.store
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>, %scores: tensor<?xf32>, %kept: tensor<?x?xf32>) -> (tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>) {
  %sums, %weighted, %shares = "kernel.routed_gradient"(%x, %weight, %scales, %bias, %positions, %order, %scores, %kept) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 1 : i64, activation = "silu", layout = "halves"} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>, tensor<?xf32>, tensor<?x?xf32>) -> (tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>)
  return %sums, %weighted, %shares : tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>
}
