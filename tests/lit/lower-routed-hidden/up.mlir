// Without gates there is one product.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-hidden{bits=128}' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_many6
// CHECK-NOT:       func.call @region_many6
// CHECK:           arith.maximumf
// CHECK:           vector.maskedstore
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> (tensor<?x?xf32>, tensor<?x?xf32>) {
  %h, %kept = "kernel.routed_hidden"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64, activation = "relu", layout = "up", keep = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> (tensor<?x?xf32>, tensor<?x?xf32>)
  return %h, %kept : tensor<?x?xf32>, tensor<?x?xf32>
}
