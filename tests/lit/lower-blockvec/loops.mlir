// Blocks that lie in vectors: of two rows and two columns in four lanes, and of four rows.
// RUN: gossamer-opt %s -p 'expose-storage,lower-blockvec,canonicalize,cse' --split-input-file | filecheck %s

// Two tokens are packed two columns of one and two of the other in turn. Four vectors of the weight, each with sums of its own,
// are in flight; what meets a vector is repeated for each of its rows.
// CHECK:       module attributes {kernel.workspace = 384 : index}
// CHECK-LABEL: func.func private @region_vectors2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         scf.for %[[K:.*]] = %c0 to %c30 step %c4
// CHECK:           %[[X0:.*]] = vector.maskedload %[[X]][%[[T0:.*]], %[[K]]]
// CHECK:           %[[X1:.*]] = vector.maskedload %[[X]][%[[T1:.*]], %[[K]]]
// CHECK:           %[[LOW:.*]] = vector.shuffle %[[X0]], %[[X1]] [0, 1, 4, 5]
// CHECK:           %[[HIGH:.*]] = vector.shuffle %[[X0]], %[[X1]] [2, 3, 6, 7]
// CHECK:           vector.store %[[LOW]], %[[PACKED:.*]][%[[AT:.*]]]
// CHECK:           vector.store %[[HIGH]], %[[PACKED]]
// CHECK:         scf.for %[[P:.*]] = %[[BEGIN:.*]] to %[[WHOLE:.*]] step %c4 iter_args(%[[S0:[a-z0-9]*]] = %{{[^)]*}}) -> (vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>, vector<4xf32>) {
// CHECK:           %[[W:.*]] = vector.load %[[VAL]]
// CHECK:           %[[PAIR:.*]] = vector.load %[[PACKED]][%{{.*}}] : memref<64xf32>, vector<2xf32>
// CHECK-NEXT:      %[[ROWS:.*]] = vector.shuffle %[[PAIR]], %{{.*}} [0, 1, 0, 1]
// CHECK-NEXT:      vector.fma %[[W]], %[[ROWS]], %[[S0]]
// CHECK:         scf.for %{{.*}} = %[[WHOLE]] to %{{.*}} step %c1

// The partial sums of two groups are the totals of four rows: neighbours are added.
// CHECK:         %[[G0:.*]] = vector.load %[[SUMS:.*]][%c0, %c0, %c0]
// CHECK:         %[[G1:.*]] = vector.load %[[SUMS]][%c0, %c1, %c0]
// CHECK:         %[[EVEN:.*]] = vector.shuffle %[[G0]], %[[G1]] [0, 2, 4, 6]
// CHECK:         %[[ODD:.*]] = vector.shuffle %[[G0]], %[[G1]] [1, 3, 5, 7]
// CHECK:         arith.addf %[[EVEN]], %[[ODD]]
// CHECK:         vector.maskedload %[[BIAS]]
// CHECK:         vector.maskedstore %[[OUT]][%[[T0]],

// One token is not packed, and past the end of K nothing of it is read (here K is a multiple of the vector's columns).
// CHECK-LABEL: func.func private @region_vectors1(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>,
// CHECK:         scf.for {{.*}} step %c8 iter_args
// CHECK:           vector.load %[[X]][%{{.*}}, %{{.*}}] : memref<?x30xf32>, vector<2xf32>
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "blockvec", tile = [2]} : (tensor<?x30xf32>, tensor<7x30xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Where the rows fill a vector, its sums are the totals, and x is a number for all of them. The eight columns of a block, which
// one coordinate stands for, take turns with eight sums.
// CHECK-LABEL: func.func private @tall_vectors1(
// CHECK-NOT:     memref.view
// CHECK:         scf.for %{{.*}} step %c1 iter_args
// CHECK:           memref.load %{{.*}} : memref<?xi16>
// CHECK-NOT:       memref.load %{{.*}} : memref<?xi16>
// CHECK:           %[[W:.*]] = vector.load %{{.*}} : memref<?xbf16>, vector<4xbf16>
// CHECK-NEXT:      %[[WIDE:.*]] = arith.extf %[[W]] : vector<4xbf16> to vector<4xf32>
// CHECK:           %[[X:.*]] = memref.load %{{.*}} : memref<?x32xbf16>
// CHECK-NEXT:      %[[XW:.*]] = arith.extf %[[X]] : bf16 to f32
// CHECK-NEXT:      %[[XS:.*]] = vector.broadcast %[[XW]]
// CHECK-NEXT:      vector.fma %[[WIDE]], %[[XS]]
// CHECK-COUNT-7:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK-COUNT-7: arith.addf
// CHECK:         vector.maskedstore
func.func @tall(%x: tensor<?x32xbf16>, %w: tensor<7x32xbf16, "blockvec(reduction=1, rows=4, columns=1, depth=8)">) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "blockvec", tile = [1]} : (tensor<?x32xbf16>, tensor<7x32xbf16, "blockvec(reduction=1, rows=4, columns=1, depth=8)">) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}

// -----

// Where K is no multiple of the vector's columns, a token that is not packed is read under a mask.
// CHECK-LABEL: func.func private @tail_vectors1(
// CHECK:         %[[LEFT:.*]] = arith.subi %c31, %[[AT:.*]] : index
// CHECK:         %[[MASK:.*]] = vector.create_mask %[[LEFT]] : vector<2xi1>
// CHECK:         vector.maskedload %{{.*}}[%{{.*}}, %[[AT]]], %[[MASK]]
func.func @tail(%x: tensor<?x31xf32>, %w: tensor<7x31xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "blockvec", tile = [1]} : (tensor<?x31xf32>, tensor<7x31xf32, "blockvec(reduction=1, rows=2, columns=2, depth=1)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
