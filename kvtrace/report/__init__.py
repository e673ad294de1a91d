"""What a store holds, said to people: numbers read, sentences, pictures. Holds no code, so that parts stay cheap."""
