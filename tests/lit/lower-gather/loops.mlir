// A few tokens: x is gathered along each row as it lies in memory.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gather,canonicalize,cse' --split-input-file | filecheck %s

// One vector of sums a token, carried in registers; all tokens share the loads of coordinates and values. The end of the row
// is masked, and so reads nothing past the last nonzero.
// CHECK:       module attributes {kernel.workspace = 16 : index}
// CHECK-LABEL: func.func private @region_rows2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         scf.for %[[P:.*]] = %[[BEGIN:.*]] to %[[WHOLE:.*]] step %c2 iter_args(%[[S0:.*]] = %[[ZERO:.*]], %[[S1:.*]] = %[[ZERO]]) -> (vector<2xf32>, vector<2xf32>) {
// CHECK-NEXT:      %[[C:.*]] = vector.load %[[CRD]][%[[P]]]
// CHECK-NEXT:      %[[COLUMNS:.*]] = arith.extui %[[C]] : vector<2xi16> to vector<2xi32>
// CHECK-NEXT:      %[[W:.*]] = vector.load %[[VAL]][%[[P]]]
// CHECK-NEXT:      %[[X0:.*]] = vector.gather %[[X]][%[[T0:.*]], %c0] [%[[COLUMNS]]]
// CHECK-NEXT:      vector.fma %[[W]], %[[X0]], %[[S0]]
// CHECK-NEXT:      %[[X1:.*]] = vector.gather %[[X]][%[[T1:.*]], %c0] [%[[COLUMNS]]]
// CHECK-NEXT:      vector.fma %[[W]], %[[X1]], %[[S1]]
// CHECK-NEXT:      scf.yield
// CHECK:         %[[MASK:.*]] = vector.create_mask
// CHECK:         vector.maskedload %[[CRD]][%[[WHOLE]]], %[[MASK]]
// CHECK:         vector.maskedload %[[VAL]][%[[WHOLE]]], %[[MASK]]
// CHECK:         vector.gather %[[X]][%[[T0]], %c0] [%{{.*}}], %[[MASK]]
// CHECK:         vector.reduction <add>
// CHECK:         memref.store

// The totals of a group of rows are a vector of results: bias is read like them, rows and tokens that do not exist are not stored.
// CHECK:         %[[LEFT:.*]] = arith.subi %c7, %[[ROW:.*]] : index
// CHECK:         %[[ROWS:.*]] = vector.create_mask %[[LEFT]]
// CHECK:         %[[EXISTS:.*]] = arith.cmpi ult
// CHECK:         %[[M:.*]] = arith.select %[[EXISTS]], %[[ROWS]]
// CHECK:         vector.maskedload %[[BIAS]][%[[ROW]]], %[[M]]
// CHECK:         vector.maskedstore %[[OUT]][%[[T0]], %[[ROW]]], %[[M]]
// CHECK-LABEL: func.func private @region_rows1(

// Threads share the rows; a chunk goes through all tokens, two at a time.
// CHECK-LABEL: func.func @region(
// CHECK:         %[[CHUNKS:.*]] = arith.minui %{{.*}}, %c4
// CHECK:         scf.parallel (%{{.*}}) = (%c0) to (%[[CHUNKS]]) step (%c1)
// CHECK:           scf.for %[[FIRST:.*]] = %c0 to %[[T:.*]] step %c2
// CHECK:             %[[MORE:.*]] = arith.subi %[[T]], %[[FIRST]]
// CHECK:             arith.cmpi ugt, %[[MORE]], %c1
// CHECK:             call @region_rows2
// CHECK:             call @region_rows1
#ROWS = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, #ROWS>, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "gather", tile = [2]} : (tensor<?x30xf32>, tensor<7x30xf32, #ROWS>) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// bf16 is widened where it is read, and coordinates of 32 bits need no widening.
// CHECK-LABEL: func.func private @narrow_rows1(
// CHECK:         %[[C:.*]] = vector.load %{{.*}} : memref<?xi32>, vector<4xi32>
// CHECK-NEXT:    %[[W:.*]] = vector.load %{{.*}} : memref<?xbf16>, vector<4xbf16>
// CHECK-NEXT:    arith.extf %[[W]] : vector<4xbf16> to vector<4xf32>
// CHECK-NEXT:    %[[X:.*]] = vector.gather %{{.*}} [%[[C]]]
// CHECK-NEXT:    arith.extf %[[X]] : vector<4xbf16> to vector<4xf32>
// CHECK:         arith.truncf
// CHECK:         vector.maskedstore %{{.*}} : memref<?x7xbf16>
#ROWS = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 32}>
func.func @narrow(%x: tensor<?x30xbf16>, %w: tensor<7x30xbf16, #ROWS>) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "gather", tile = [1]} : (tensor<?x30xbf16>, tensor<7x30xbf16, #ROWS>) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}
