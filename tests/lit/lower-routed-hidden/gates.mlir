// The sums of gates and those of up go through the activation; those that are kept are stored beside.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-hidden' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK-COUNT-2:   func.call @region_many6
// CHECK:           math.exp
// CHECK:           arith.divf
// CHECK-COUNT-3:   vector.maskedstore
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> (tensor<?x?xf32>, tensor<?x?xf32>) {
  %h, %kept = "kernel.routed_hidden"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64, activation = "silu", layout = "halves", keep = 1 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> (tensor<?x?xf32>, tensor<?x?xf32>)
  return %h, %kept : tensor<?x?xf32>, tensor<?x?xf32>
}
