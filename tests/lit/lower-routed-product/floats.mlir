// Few slots: rows one after the other, for one slot without fetching. Many: 24 sums of 6 slots and 4 vectors of rows, in
// registers of 512 bits, with a panel that is packed once for all. Sums are written to the rows of the slots.
// RUN: gossamer-opt %s -p 'expose-storage,lower-routed-product{streams=true}' | filecheck %s

// CHECK-LABEL: func.func private @region_few8(
// CHECK-COUNT-16:  vector.fma
// CHECK-LABEL: func.func private @region_few1(
// CHECK-NOT:       memref.prefetch
// CHECK-COUNT-8:   vector.fma
// CHECK-LABEL: func.func private @region_many6(
// CHECK:         scf.for
// CHECK-COUNT-2:   memref.prefetch
// CHECK-COUNT-6:   memref.load
// CHECK-COUNT-4:   vector.load
// CHECK-COUNT-24:  vector.fma
// CHECK-NEXT:      scf.yield
// CHECK-COUNT-24: vector.store
// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[W:[a-z0-9]*]]: memref<?x?x?xf32>
// CHECK:         scf.parallel
// CHECK:           scf.for
// CHECK:             func.call @region_few8
// CHECK:             func.call @region_pack
// CHECK:             func.call @region_many6
// CHECK:             vector.maskedstore
func.func @region(%x: tensor<?x?xf32>, %weight: tensor<?x?x?xf32>, %scales: tensor<?x?x?xf32>, %bias: tensor<?x?xf32>, %positions: tensor<?xi64>, %order: tensor<?xi64>) -> tensor<?x?xf32> {
  %y = "kernel.routed_product"(%x, %weight, %scales, %bias, %positions, %order) {top = 8 : i64, dots = 0 : i64, four = 0 : i64, group = 0 : i64, turned = 0 : i64} : (tensor<?x?xf32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>, tensor<?x?xf32>, tensor<?xi64>, tensor<?xi64>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
