// Each thread sets its rows to zero, and adds what the slots of a token give, times their scores.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-sum' | filecheck %s

// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[SCORES:[a-z0-9]*]]: memref<?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>
// CHECK:         scf.parallel
// CHECK:           vector.maskedstore %[[Y]]
// CHECK:           func.call @region_many6
// CHECK:           memref.load %[[SCORES]]
// CHECK:           vector.maskedload %[[Y]]
// CHECK:           vector.fma
// CHECK:           vector.maskedstore %[[Y]]
func.func @region(%h: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>, %scores: tensor<?xf32>) -> tensor<?x?xf32> {
  %y = "kernel.routed_sum"(%h, %weight, %scales, %bias, %positions, %order, %scores) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>, tensor<?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
