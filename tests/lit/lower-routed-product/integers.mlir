// Groups of 4 bits on 256 bits: bytes become two vectors of floats by shifts, times the scale of their group.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{bits=256}' | filecheck %s

// CHECK-LABEL: func.func private @region_pack(
// CHECK:         arith.divui
// CHECK:         arith.shrsi
// CHECK:         arith.sitofp %{{.*}} : vector<8xi32> to vector<8xf32>
// CHECK:         arith.mulf
// CHECK:         vector.shuffle
// CHECK-LABEL: func.func private @region_many6(
// CHECK-COUNT-12: vector.fma
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xi8>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xf32> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 2 : i64, dots = 0 : i64, four = 1 : i64, group = 32 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xi8>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
