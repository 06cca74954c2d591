// Where the epilogue runs: on the sums of a row, once they are complete, or on results of a token, after the transpose.
// RUN: gossamer-opt %s -p 'expose-storage,lower-broadcast,canonicalize,cse' --split-input-file | filecheck %s

// Bias and tanh run on the sums. The residual lies by tokens, so it is read after the transpose, masked like the result.
// CHECK-LABEL: func.func private @both_tile4(
// CHECK-SAME:    %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[RESIDUAL:[a-z0-9]*]]: memref<?x7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         arith.addf %{{.*}}#1, %{{.*}}#3 : vector<2xf32>
// CHECK-NEXT:    scf.if %[[LAST:.*]] -> (vector<2xf32>, vector<2xf32>) {
// CHECK:           %[[B:.*]] = memref.load %[[BIAS]]
// CHECK:           vector.broadcast %[[B]]
// CHECK-COUNT-2:   math.tanh %{{.*}} : vector<2xf32>
// CHECK:         else
// CHECK:         vector.store
// CHECK:         scf.if %[[LAST]]
// CHECK-NOT:       math.tanh
// CHECK:           %[[V:.*]] = vector.shuffle
// CHECK:           %[[R:.*]] = vector.maskedload %[[RESIDUAL]][%[[AT:.*]], %[[ROW:.*]]], %[[MASK:.*]], %{{.*}}
// CHECK:           %[[Y:.*]] = arith.mulf %[[V]], %[[R]]
// CHECK:           vector.maskedstore %[[OUT]][%[[AT]], %[[ROW]]], %[[MASK]], %[[Y]]
func.func @both(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">, %bias: tensor<7xf32>, %residual: tensor<?x7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    %1 = math.tanh %0 : f32
    %r = "kernel.read"(%residual) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x7xf32>) -> f32
    %2 = arith.mulf %1, %r : f32
    "kernel.yield"(%2) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// One number a token is read after the transpose too; one number for all is not.
// CHECK-LABEL: func.func private @scales_tile4(
// CHECK-SAME:    %[[ALPHA:[a-z0-9]*]]: memref<f32>, %[[SCALE:[a-z0-9]*]]: memref<?x1xf32>,
// CHECK:         memref.load %[[ALPHA]][] : memref<f32>
// CHECK:         vector.shuffle
// CHECK:         %[[S:.*]] = memref.load %[[SCALE]][%[[SAFE:.*]], %c0] : memref<?x1xf32>
// CHECK:         vector.broadcast %[[S]] : f32 to vector<2xf32>
func.func @scales(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">, %alpha: tensor<f32>, %scale: tensor<?x1xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %a = "kernel.read"(%alpha) {map = affine_map<(t, m) -> ()>} : (tensor<f32>) -> f32
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (t, 0)>} : (tensor<?x1xf32>) -> f32
    %0 = arith.mulf %sum, %a : f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// A comparison of the sum cannot lie where sums lie: all of this epilogue runs after the transpose.
// CHECK-LABEL: func.func private @gate_tile4(
// CHECK-NOT:     arith.cmpf
// CHECK:         vector.shuffle %{{.*}} [0, 2]
// CHECK:         vector.shuffle %{{.*}} [0, 2]
// CHECK:         vector.shuffle %{{.*}} [0, 2]
// CHECK:         vector.maskedload
// CHECK:         arith.cmpf ogt
// CHECK:         arith.select {{.*}} : vector<2xi1>, vector<2xf32>
// CHECK:         vector.maskedstore
func.func @gate(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">, %residual: tensor<?x7xf32>) -> tensor<?x7xf32> {
  %zero = arith.constant 0.0 : f32
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %r = "kernel.read"(%residual) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x7xf32>) -> f32
    %0 = arith.cmpf ogt, %sum, %zero : f32
    %1 = arith.select %0, %r, %zero : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Narrow floats are widened where x and the weight are read, and rounded where the epilogue says so.
// CHECK-LABEL: func.func private @bf16_tile4(
// CHECK:         %[[X:.*]] = vector.load %{{.*}} : memref<?x30xbf16>
// CHECK-NEXT:    arith.extf %[[X]] : vector<2xbf16> to vector<2xf32>
// CHECK:         %[[W:.*]] = vector.load %{{.*}} : memref<?xbf16>, vector<4xbf16>
// CHECK-NEXT:    arith.extf %[[W]] : vector<4xbf16> to vector<4xf32>
// CHECK:         arith.truncf %{{.*}} : vector<2xf32> to vector<2xbf16>
// CHECK:         vector.maskedstore %{{.*}} : memref<?x7xbf16>
func.func @bf16(%x: tensor<?x30xbf16>, %w: tensor<7x30xbf16, "padded(reduction=1, columns=16)">) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [4]} : (tensor<?x30xbf16>, tensor<7x30xbf16, "padded(reduction=1, columns=16)">) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}
