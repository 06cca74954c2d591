// Tiles of a few rows and up to 2 vectors of columns, the last masked; the rows of the next tile are fetched meanwhile.
// RUN: gossamer-opt %s -p 'expose-storage,lower-tall' | filecheck %s

// CHECK-LABEL: func.func private @region_columns2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x?xf32>, %[[W:[a-z0-9]*]]: memref<?x?xf32>, %[[Y:[a-z0-9]*]]: memref<?x?xf32>, %[[BEGIN:[a-z0-9]*]]: index, %[[END:[a-z0-9]*]]: index
// CHECK:         %[[LAST:.*]] = arith.subi %[[END]]
// CHECK:         scf.for %[[ROW:[a-z0-9]*]] = %[[BEGIN]] to %[[END]]
// CHECK-COUNT-5:   arith.minui %{{.*}}, %[[LAST]]
// CHECK:           scf.for
// CHECK-COUNT-2:     vector.create_mask
// CHECK:             scf.for
// CHECK:               memref.prefetch
// CHECK-COUNT-2:       vector.maskedload %[[W]]
// CHECK-COUNT-10:      math.fma
// CHECK-COUNT-10:    vector.maskedstore %[[Y]]
// CHECK-LABEL: func.func private @region_columns1(
// CHECK-COUNT-8:       math.fma
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_columns2
// CHECK:           func.call @region_columns1
func.func @region(%x: tensor<?x?xf32>, %w: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %y = "kernel.tall_product"(%x, %w) {lanes = 8 : i64, vectors = 2 : i64} : (tensor<?x?xf32>, tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
